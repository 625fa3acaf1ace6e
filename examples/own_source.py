"""Own source: read a file format of your own

A source turns raw files into a dataset folder. This one reads a CSV file for each patient. In a package of your own,
an entry point makes it the command ``manydg prepare wearable``; CONTRIBUTING.md shows how.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch

import manydg
from manydg.data.info import DatasetInfo, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import DataError
from manydg.sources import NewSamples, Options, Source, TrainedOn, option


@dataclass(frozen=True)
class WearableOptions(Options):
    """Options of the command, each with its help."""

    limit_patients: int | None = option(None, help="Take only the first so many patients.", low=1)


class Wearable(Source[WearableOptions, Options]):
    """Minutes of a wristband: heart rate and steps, and whether the person slept."""

    name = "wearable"
    options_class = WearableOptions

    def looks_like(self, folder: Path) -> bool:
        """Whether a folder holds such files."""
        return any(folder.glob("person-*.csv"))

    def prepare(
        self, raw: Path, out: Path, options: WearableOptions, *, workers: int = 1, overwrite: bool = False
    ) -> Path:
        """Write the dataset folder, one patient at a time."""
        files = sorted(raw.glob("person-*.csv"))[: options.limit_patients]
        if not files:
            raise DataError(f"{raw} has no file person-*.csv: name the folder of the recordings")
        target, info = TargetSpec("binary", ("awake", "asleep")), DatasetInfo()
        with DatasetWriter(out, target, info, overwrite=overwrite) as writer:
            for file in files:
                minutes = pl.read_csv(file)
                inputs = _inputs(minutes)
                writer.append({"x": inputs}, minutes["asleep"].to_numpy(), [file.stem] * len(inputs))
        return out

    def for_prediction(self, raw: Path, trained: TrainedOn, options: Options) -> Iterator[NewSamples]:
        """Samples of new files, which have no labels."""
        for file in sorted(raw.glob("person-*.csv")):
            inputs = torch.from_numpy(_inputs(pl.read_csv(file)))
            rows = pl.DataFrame({"file": file.stem, "minute": np.arange(len(inputs))})
            yield NewSamples({"x": inputs}, rows, np.full(len(inputs), file.stem), origin=file)


def _inputs(minutes: pl.DataFrame) -> np.ndarray:
    return minutes.select("heart_rate", "steps").to_numpy().astype(np.float32)


def write_raw(folder: Path, people: int = 20, minutes: int = 30) -> Path:
    """Synthetic files of people who do not exist."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for person in range(people):
        asleep = np.arange(minutes) % 2
        heart_rate = rng.normal(75, 10) - 12 * asleep + rng.normal(0, 4, minutes)
        steps = rng.poisson(np.where(asleep, 0.2, 6))
        table = pl.DataFrame({"heart_rate": heart_rate, "steps": steps, "asleep": asleep})
        table.write_csv(folder / f"person-{person:02d}.csv")
    return folder


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="manydg-example-"))
    dataset = Wearable().prepare(write_raw(folder / "raw"), folder / "dataset", WearableOptions())
    data = manydg.open_dataset(dataset)
    print(data)
    run = manydg.train(data, algorithm="boosting")
    print(f"AUROC {run.record.test['auroc']:.2f} on test patients")


if __name__ == "__main__":
    main()
