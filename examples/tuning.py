"""Tuning: the same number of trials for every algorithm

Searches the settings of two algorithms on validation patients, then scores what was chosen on test patients, once.
Needs the extra ``manydg[tune]``.

On the command line:

    manydg tune dataset --algorithms base,manydg --trials 3 --seeds 1 --epochs 3 --out tuned
    manydg compare dataset --algorithms base,manydg --seeds 1 --epochs 3 --tuned tuned --out results
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from manydg import TrainingConfig
from manydg.studies.conduct import compare
from manydg.studies.settings import as_options
from manydg.studies.tuning import tune
from manydg.synthetic import make_demo_dataset


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="manydg-example-"))
    make_demo_dataset(patients=30, samples=10).save(folder / "dataset")
    algorithms, options = ["base", "manydg"], as_options(TrainingConfig(epochs=3))
    tuning = tune(folder / "dataset", algorithms, folder / "tuned", trials=3, seeds=1, options=options)
    for search in tuning.searches:
        assert search.chosen is not None
        print(f"{search.algorithm}: trial {search.chosen.number}, validation kappa {search.chosen.score:.2f}")
    records = compare(folder / "dataset", algorithms, 1, folder / "results", options=options, tuned=folder / "tuned")
    for record in records:
        print(f"{record.config.algorithm}: kappa {record.test['kappa']:.2f} on test patients")


if __name__ == "__main__":
    main()
