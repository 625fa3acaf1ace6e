"""Records of a results folder: one per run, however many experiments the run serves.

A run's folder holds ``run.json`` or, if it failed, ``failed.json``, and one small file for each use of the run: the
experiment, and what distinguishes the run there. ``results.jsonl`` is made from them and lists every use of a run in
its record's ``experiments``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from manydg.code_version import code_version
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import StorageError
from manydg.files import append_line, fingerprint, read_json, refuse_dataset_folder, write_atomically, write_json
from manydg.targets import target_of

RESULTS, RUNS, STUDY = "results.jsonl", "runs", "study.json"
RUN_RECORD, FAILURE, STATUS = "run.json", "failed.json", "status.json"
_USE = "use-"
Record = Mapping[str, Any]


def uses_of(record: Record) -> list[dict[str, Any]]:
    """The record as each of its experiments sees it.

    Examples
    --------
    >>> uses = [{"experiment": "compare", "variant": {}}, {"experiment": "weights", "variant": {"mmd": 1}}]
    >>> [view["experiment"] for view in uses_of({"run": "f0", **uses[0], "experiments": uses})]
    ['compare', 'weights']
    """
    own = {"experiment": record.get("experiment"), "variant": record.get("variant") or {}}
    common = {key: value for key, value in record.items() if key != "experiments"}
    return [{**common, **use} for use in record.get("experiments") or [own]]


def view_of(record: Record, experiment: str, variant: Mapping[str, Any]) -> dict[str, Any]:
    """The record as one experiment sees it."""
    return uses_of({**record, "experiments": [{"experiment": experiment, "variant": dict(variant)}]})[0]


def views(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Every use of every record."""
    return [view for record in records for view in uses_of(record)]


def mark_use(folder: Path, experiment: str, variant: Mapping[str, Any]) -> None:
    """Note in a run's folder that an experiment uses the run; a use noted before is left as it is."""
    use = {"experiment": experiment, "variant": dict(variant)}
    file = folder / f"{_USE}{fingerprint(use)}.json"
    if not file.exists():
        write_json(file, use, indent=None)


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Every run's record in a results folder with its uses, the finished and the failed, oldest first."""
    found = []
    for place in (folder / RUNS).glob("*"):
        file = place / RUN_RECORD if (place / RUN_RECORD).exists() else place / FAILURE
        if file.exists():
            found.append((file.stat().st_mtime_ns, place.name, file))
    records = [(name, read_run(file.parent)) for _, name, file in sorted(found)]
    # A record that does not bear its folder's name was not yet marked as the study's when it was interrupted.
    return [record for name, record in records if record.get("run") == name]


def read_run(place: Path) -> dict[str, Any]:
    """One run's record, finished or failed, with its uses."""
    done = place / RUN_RECORD
    record = read_record(done if done.exists() else place / FAILURE)
    own = {"experiment": record.get("experiment"), "variant": record.get("variant") or {}}
    others = sorted(
        (read_record(file) for file in place.glob(f"{_USE}*.json")),
        key=lambda use: (use["experiment"], json.dumps(use["variant"])),
    )
    return {**record, "experiments": [own, *(use for use in others if use != own)]}


def read_record(file: Path) -> dict[str, Any]:
    """One JSON object of a results folder."""
    return read_json(
        file,
        remedy="delete it and run the same command again",
        missing=f"{file} is missing: run the same command again",
    )


def collect(folder: Path) -> None:
    """Write ``results.jsonl`` anew from the runs in the folder: it never misses one or holds one twice."""
    lines = [json.dumps(record) for record in read_runs(folder)]
    write_atomically(folder / RESULTS, "".join(line + "\n" for line in lines))


def append(folder: Path, record: Record) -> None:
    """Add a run's record to ``results.jsonl``; writing all of it after each of thousands of runs would take longer."""
    append_line(folder / RESULTS, json.dumps(record))


def read_results(folder: str | Path) -> list[dict[str, Any]]:
    """The records of ``results.jsonl``, one per run."""
    file = Path(folder) / RESULTS
    if not file.exists():
        raise StorageError(f"{folder} holds no results: it has no {RESULTS}. Make some with 'manydg compare'")
    records = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise StorageError(f"{file}, line {number} is damaged: run the command that made it again") from None
    return records


# What a results folder is of: the datasets and the commands, for the report.


def describe_study(folder: Path, dataset: Path, name: str, experiment: str, command: str) -> None:
    """Note in ``study.json`` what the results are of and how they were made; the report reads it."""
    refuse_dataset_folder(folder)
    file = folder / STUDY
    known = read_record(file) if file.exists() else {"commands": {}, "datasets": {}}
    data = open_dataset(dataset, verify="sizes")
    counts = data.domains.bincount().double()
    quantiles = {str(q): float(counts.quantile(q)) for q in (0.0, 0.25, 0.5, 0.75, 1.0)}
    commands = {**known["datasets"].get(name, {}).get("commands", {}), experiment: command}
    known["datasets"][name] = known["dataset"] = {
        "name": name,
        "hash": data.content_hash(),
        "samples": len(data),
        "patients": data.n_patients,
        "target": {"kind": data.target.kind, "names": list(data.target.names)},
        "label_counts": label_counts(data),
        "samples_per_patient": quantiles,
        "cohort_flow": [step.to_json() for step in data.info.cohort_flow],
        "provenance": data.info.provenance.to_json() if data.info.provenance else {},
        "commands": commands,
    }
    known["commands"][experiment] = command
    known["code_version"] = code_version()
    known["created"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    write_json(file, known)


def label_counts(data: DomainDataset) -> dict[str, int]:
    """How often each class or label occurs; votes count their majority class."""
    target = target_of(data.target)
    truth = target.truth(data.targets)
    counts = truth.sum(dim=0) if truth.ndim == 2 else truth.bincount(minlength=data.target.size)
    return {name: int(count) for name, count in zip(data.target.names, counts.tolist(), strict=True)}
