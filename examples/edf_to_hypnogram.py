"""EDF to hypnogram: train on scored nights, score a new one

Writes synthetic sleep recordings as EDF files with scorings, trains a network on them, and scores a recording of a new
person. The result is a table, an EDF+ annotation file and a picture.

On the command line:

    manydg prepare edf nights --labels aasm --channels C4-M1 --rate 100 --out dataset
    manydg train dataset --algorithm base --epochs 5 --batch-size 16 --lr 3e-3 --out run
    manydg predict run new-night --out scored
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import manydg
from manydg.predict import predict_raw
from manydg.sources import prepare, synthesize


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="manydg-example-"))
    synthesize("edf", folder / "nights", patients=12, recordings=1, minutes=12)
    synthesize("edf", folder / "new-night", patients=1, recordings=1, minutes=12, seed=1)
    dataset = prepare(
        "edf", folder / "nights", folder / "dataset", labels="aasm", channels=("C4-M1",), rate=100, unusable="skip"
    )
    data = manydg.open_dataset(dataset)
    run = manydg.train(data, algorithm="base", epochs=5, batch_size=16, lr=3e-3, out=folder / "run")
    print(f"kappa on test patients: {run.record.test['kappa']:.2f}")
    for file in predict_raw(folder / "run", folder / "new-night", folder / "scored"):
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
