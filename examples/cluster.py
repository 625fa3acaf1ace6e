"""Cluster: runs on a Ray cluster

Starts Ray on this machine and does two runs on it. With ``address="HOST:PORT"`` the same code uses a cluster. Needs the
extra ``manydg[ray]``.

On the command line:

    manydg compare dataset --algorithms base,manydg --seeds 1 --epochs 1 --engine ray --workers 2 --out results
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from manydg import TrainingConfig
from manydg.jobs import engine_named, using
from manydg.studies.conduct import compare
from manydg.synthetic import make_demo_dataset


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="manydg-example-"))
    make_demo_dataset(patients=20, samples=8).save(folder / "dataset")
    with using(engine_named("ray")):
        records = compare(
            folder / "dataset", ["base", "manydg"], 1, folder / "results", options=TrainingConfig(epochs=1), workers=2
        )
    for record in records:
        print(f"{record.config.algorithm}: kappa {record.test['kappa']:.2f} on test patients")


if __name__ == "__main__":
    main()
