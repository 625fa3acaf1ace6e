"""What a results folder is of: the datasets and the commands, for the report."""

from __future__ import annotations

import json
import time
from pathlib import Path

from manydg.data._files import refuse_dataset_folder
from manydg.data.dataset import DomainDataset
from manydg.data.storage import open_dataset, write_atomically
from manydg.experiments.records import STUDY, read_record
from manydg.targets import target_of
from manydg.training.version import code_version


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
        "cohort_flow": data.info.get("cohort_flow", []),
        "provenance": data.info.get("provenance", {}),
        "commands": commands,
    }
    known["commands"][experiment] = command
    known["code_version"] = code_version()
    known["created"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    write_atomically(file, json.dumps(known, indent=1))


def label_counts(data: DomainDataset) -> dict[str, int]:
    """How often each class or label occurs; votes count their majority class."""
    target = target_of(data.target)
    truth = target.truth(data.targets)
    counts = truth.sum(dim=0) if truth.ndim == 2 else truth.bincount(minlength=data.target.size)
    return {name: int(count) for name, count in zip(data.target.names, counts.tolist(), strict=True)}
