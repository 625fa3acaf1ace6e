"""A dataset folder in figures: counts, labels, samples per patient, cohort flow, and found against expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.data.storage import open_dataset
from manydg.sources.expected import EXPECTED, compare_counts


def summarize(folder: str | Path) -> dict[str, Any]:
    """Everything ``manydg inspect`` shows, as JSON values; inputs are not read, so size does not matter."""
    data = open_dataset(folder, verify="sizes")
    record = data.info.get("provenance", {})
    source = str(record.get("source", ""))
    flow = data.info.get("cohort_flow", [])
    expected = EXPECTED.get(source)
    return {
        "dataset": Path(folder).name,
        "source": source or None,
        "content_hash": data.content_hash(),
        "samples": len(data),
        "patients": data.n_patients,
        "inputs": InputSchema.of(data).to_json()["columns"],
        "vocabularies": vocabulary_sizes(data),
        "target": {"kind": data.target.kind, "names": list(data.target.names)},
        "labels": label_table(data, dict(expected.shares) if expected else {}),
        "labels_per_sample": labels_per_sample(data),
        "samples_per_patient": samples_per_patient(data),
        "cohort_flow": flow,
        "options": record.get("options", {}),
        "files": len(record.get("files", [])),
        "expected": {
            "edition": expected.edition if expected else None,
            "labels_per_sample": dict(expected.labels_per_sample) if expected else {},
            "notes": dict(expected.notes) if expected else {},
            "counts": [
                row.to_json() for row in compare_counts(source, found_counts(data), flow, record.get("options", {}))
            ],
        },
    }


def found_counts(data: DomainDataset) -> dict[str, int]:
    """Counts by the names that expected counts go by."""
    return {"patients": data.n_patients, "samples": len(data)} | vocabulary_sizes(data)


def vocabulary_sizes(data: DomainDataset) -> dict[str, int]:
    """Number of real codes in each vocabulary (the unknown code is none), and in each field of an event vocabulary."""
    sizes = {
        name: sum(word != "<unknown>" for word in words) for name, words in data.info.get("vocabularies", {}).items()
    }
    fields = data.info.get("settings", {}).get("code_fields", [])
    return sizes | {field["name"]: int(field["stop"]) - int(field["start"]) for field in fields}


def indicators(data: DomainDataset) -> npt.NDArray[np.bool_]:
    """Which labels each sample has, ``(rows, K)``; of votes, the class with the most."""
    targets = data.targets.numpy()
    if data.target.kind == "multilabel":
        return np.asarray(targets > 0)
    classes = targets.argmax(axis=1) if data.target.kind == "votes" else targets
    return np.asarray(classes[:, None] == np.arange(data.target.size))


def label_table(data: DomainDataset, expected: dict[str, float]) -> list[dict[str, Any]]:
    """Samples, share and patients of each label, with the share the paper prints where it does."""
    present = indicators(data)
    counts = present.sum(axis=0)
    rows: list[dict[str, Any]] = []
    for code in np.argsort(-counts, kind="stable") if data.target.kind == "multilabel" else range(data.target.size):
        name = data.target.names[int(code)]
        domains = data.domains.numpy()[present[:, code]]
        rows.append(
            {
                "label": name,
                "samples": int(counts[code]),
                "share": float(counts[code] / max(len(data), 1)),
                "patients": len(np.unique(domains)),
                "expected_share": expected.get(name),
            }
        )
    return rows


def labels_per_sample(data: DomainDataset) -> dict[str, float] | None:
    """Mean and most labels of a sample; only for multi-label targets."""
    if data.target.kind != "multilabel":
        return None
    each = indicators(data).sum(axis=1)
    return {"mean": float(each.mean()), "most": int(each.max())}


def samples_per_patient(data: DomainDataset) -> dict[str, float]:
    """Quantiles of the number of samples a patient has, and how many patients have but one."""
    counts = np.bincount(data.domains.numpy(), minlength=data.n_patients)
    low, first, median, third, high = np.quantile(counts, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return {
        "least": low,
        "first_quartile": first,
        "median": median,
        "third_quartile": third,
        "most": high,
        "mean": float(counts.mean()),
        "patients_with_one": int((counts == 1).sum()),
    }
