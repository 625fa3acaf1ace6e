"""Records sorted for a summary: which runs count, which failed or are missing, and their predictions."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manydg.data.dataset import TargetSpec
from manydg.errors import DataError, StorageError
from manydg.evaluation.statistics import Predictions
from manydg.experiments.records import views
from manydg.targets import Target, target_of

Record = Mapping[str, Any]
ORDER = (
    "base",
    "prototype",
    "manydg-random-pairs",
    "condadv",
    "dann",
    "irm",
    "sagnet",
    "pcl",
    "mldg",
    "simd1",
    "simd2",
    "ema",
    "swad",
    "coral",
    "vrex",
    "groupdro",
    "eqrm",
    "mixstyle",
    "bn-adapt",
    "arm",
    "boosting",
)
"""The plain model and the controls first, then the rivals, then algorithms not named here; ManyDG ends a table."""
LAST = "manydg"


@dataclass(frozen=True)
class Selection:
    """The runs of one experiment on one dataset that count, and what has to be said about the others.

    Parameters
    ----------
    experiment, dataset : str
    target : Target
    rows : dict
        Row of the table to seed to record, rows in the order they are shown; at least one row has a record.
    seeds : tuple of int
        Every seed that any row was asked to run.
    notes : tuple of str
    """

    experiment: str
    dataset: str
    target: Target
    rows: dict[str, dict[int, Record]]
    seeds: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def records(self) -> list[Record]:
        """Every run that counts."""
        return [record for runs in self.rows.values() for record in runs.values()]


def group_records(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records by experiment and dataset, in the order they are met; a run that serves several stands in each."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in views(records):
        groups.setdefault((str(record.get("experiment")), str(record.get("dataset"))), []).append(record)
    return groups


def row_name(record: Record) -> str:
    """What a run is called in a table: its algorithm, and what varies within the experiment.

    Examples
    --------
    >>> row_name({"algorithm": "manydg", "variant": {"mmd": 0.1}})
    'manydg (mmd 0.1)'
    """
    variant = record.get("variant") or {}
    detail = ", ".join(value if isinstance(value, str) else f"{key} {value}" for key, value in variant.items())
    return f"{record['algorithm']} ({detail})" if detail else str(record["algorithm"])


def select(records: Sequence[Record]) -> Selection:
    """Choose the runs that count among the records of one experiment on one dataset.

    Raises
    ------
    DataError
        If the records are of several experiments or datasets, or no run ended well.
    """
    groups = group_records(records)
    if len(groups) > 1:
        names = "; ".join(f"{experiment} on {dataset}" for experiment, dataset in groups)
        raise DataError(f"a summary is of one experiment on one dataset; these records are of {names}")
    good = [record for record in records if record.get("status") == "ok" and record.get("test")]
    if not good:
        errors = list(dict.fromkeys(_last_line(record) for record in records if record.get("status") == "failed"))
        raise DataError("no run ended well, so there is nothing to sum up" + "".join(f"; {e}" for e in errors[:3]))
    kept, notes = _of_one_dataset_version(good)
    failed = [record for record in records if record.get("status") == "failed"]
    rows, again = _by_row(kept, failed)
    seeds = tuple(sorted({int(record["seed"]) for record in records}))
    notes += again + _absences(records, rows, seeds)
    versions = {str(record.get("code_version")) for record in kept}
    if len(versions) > 1:
        notes.append(f"the runs come from {len(versions)} versions of the code")
    spec = kept[-1]["target"]
    target = target_of(TargetSpec(spec["kind"], tuple(spec["names"])))
    experiment, dataset = next(iter(groups))
    return Selection(experiment, dataset, target, rows, seeds, tuple(notes))


def _of_one_dataset_version(good: Sequence[Record]) -> tuple[list[Record], list[str]]:
    newest = good[-1].get("dataset_hash")
    kept = [record for record in good if record.get("dataset_hash") == newest]
    left = len(good) - len(kept)
    note = f"{left} run{'s' if left > 1 else ''} on another version of the dataset left out"
    return kept, [note] if left else []


def _by_row(records: Sequence[Record], failed: Sequence[Record]) -> tuple[dict[str, dict[int, Record]], list[str]]:
    """Runs by row and seed; a row of which every run failed stays in the table, empty."""
    found: dict[str, dict[int, Record]] = {row_name(record): {} for record in failed}
    notes = []
    for record in records:
        seeds = found.setdefault(row_name(record), {})
        if int(record["seed"]) in seeds:
            notes.append(f"{row_name(record)}, seed {record['seed']} was run more than once: the last run counts")
        seeds[int(record["seed"])] = record
    algorithms = {row_name(record): str(record["algorithm"]) for record in [*records, *failed]}
    ordered = sorted(found, key=lambda row: _place(algorithms[row]))
    return {row: dict(sorted(found[row].items())) for row in ordered}, list(dict.fromkeys(notes))


def _place(algorithm: str) -> int:
    if algorithm == LAST:
        return len(ORDER) + 1
    return ORDER.index(algorithm) if algorithm in ORDER else len(ORDER)


def _absences(records: Sequence[Record], rows: Mapping[str, Mapping[int, Record]], seeds: Sequence[int]) -> list[str]:
    """One line for each failed run that no later run replaced, and for each row that lacks seeds."""
    failed: dict[tuple[str, int], str] = {}
    for record in records:
        if record.get("status") == "failed":
            failed[row_name(record), int(record["seed"])] = _last_line(record)
    lines = [f"{row}, seed {seed} failed: {error}" for (row, seed), error in failed.items() if seed not in rows[row]]
    for row, runs in rows.items():
        missing = [str(seed) for seed in seeds if seed not in runs and (row, seed) not in failed]
        if missing:
            lines.append(f"{row} has no run for seed{'s' if len(missing) > 1 else ''} {', '.join(missing)}")
    return lines


def _last_line(record: Record) -> str:
    lines = str(record.get("error") or "no reason given").strip().splitlines()
    return lines[-1][:200]


def value_of(record: Record, metric: str) -> float:
    """A test metric; NaN where it is undefined or absent."""
    value = (record.get("test") or {}).get(metric)
    return math.nan if value is None else float(value)


def same_patients(first: Record, second: Record) -> bool:
    """Whether two runs were tested on the same people; runs that do not say are trusted."""
    ours, theirs = first.get("per_patient"), second.get("per_patient")
    return not ours or not theirs or set(ours) == set(theirs)


def load_predictions(folder: str | Path, record: Record) -> Predictions | None:
    """Test predictions of a run of a results folder; None where the run's folder is not here.

    Raises
    ------
    StorageError
        If the file is damaged.
    """
    path = Path(folder) / str(record.get("folder") or f"runs/{record['run']}") / "predictions.npz"
    if record.get("status") != "ok" or not path.is_file():
        return None
    spec = record["target"]
    target = target_of(TargetSpec(spec["kind"], tuple(spec["names"])))
    try:
        with np.load(path, allow_pickle=False) as arrays:
            test = arrays["split"] == 1
            people = arrays["pseudonyms"][arrays["patient"][test]]
            return Predictions(
                target, arrays["truth"][test], arrays["probabilities"][test], people, record.get("threshold")
            )
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise StorageError(f"{path} cannot be read ({error}): delete the run's folder and run it again") from error
