"""A dataset folder in figures: counts, labels, samples per patient, cohort flow, and found against expected."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from manydg.data.dataset import DomainDataset, open_dataset
from manydg.data.info import Provenance
from manydg.data.schema import InputSchema

# What the paper counts in its four datasets, and what explains a difference from what was found.


@dataclass(frozen=True)
class Expected:
    """The counts a publication states for a dataset.

    Parameters
    ----------
    edition : str
        Which data the counts are about.
    counts : dict of str to int
        By name: ``patients``, ``samples``, or the number of codes of a vocabulary.
    shares : dict of str to float
        Share of each label, as a fraction.
    labels_per_sample : dict of str to float
        ``mean`` and ``most`` labels of a sample, for multi-label targets.
    at_least : frozenset of str
        Counts that are only known from below.
    notes : dict of str to str
        What is known about a count that readers trip over.
    """

    edition: str
    counts: Mapping[str, int]
    shares: Mapping[str, float] = field(default_factory=dict)
    labels_per_sample: Mapping[str, float] = field(default_factory=dict)
    at_least: frozenset[str] = frozenset()
    notes: Mapping[str, str] = field(default_factory=dict)


EXPECTED: dict[str, Expected] = {
    "sleep-edf": Expected(
        "Sleep-EDF Expanded 1.0.0, Cassette: 153 nights",
        {"patients": 78, "samples": 415_089},
        {"W": 0.688, "N1": 0.052, "N2": 0.166, "N3": 0.032, "REM": 0.062},
        notes={
            "samples": "the published features of the same 153 nights hold 414,961 scored epochs, 128 fewer than the "
            "paper prints"
        },
    ),
    "iiic": Expected(
        "IIIC seizure patterns, samples with five or more votes",
        {"patients": 2_702, "samples": 165_309},
        {"OTHER": 0.264, "ESZ": 0.037, "LPD": 0.197, "GPD": 0.242, "LRDA": 0.144, "GRDA": 0.117},
    ),
    "mimic3": Expected(
        "MIMIC-III 1.4, patients with two or more visits",
        {"patients": 6_350, "samples": 15_032, "diagnoses": 1_958, "procedures": 1_430, "drugs": 112},
        labels_per_sample={"mean": 11.65, "most": 64},
        notes={"drugs": "which drugs remain hangs on the NDC to ATC mapping that is used"},
    ),
    "eicu": Expected(
        "eICU 2.0",
        {
            "patients": 140_000,
            "diagnosis_string": 3_845,
            "diagnosis_icd": 1_195,
            "lab": 158,
            "medication": 291,
            "physical_exam": 462,
            "treatment": 2_695,
        },
        {"not readmitted": 0.8378, "readmitted": 0.1622},
        at_least=frozenset({"patients"}),
        notes={"readmitted": "the paper prints 83.78 / 16.22 the other way round: about one stay in six is positive"},
    ),
}


@dataclass(frozen=True)
class Comparison:
    """One count, found against expected, and what explains the difference."""

    name: str
    found: int
    expected: int
    at_least: bool
    explanation: str

    def to_json(self) -> dict[str, Any]:
        return {
            "count": self.name,
            "found": self.found,
            "expected": self.expected,
            "at_least": self.at_least,
            "difference": self.found - self.expected,
            "explanation": self.explanation,
        }


def compare_counts(
    source: str, found: Mapping[str, int], flow: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[Comparison]:
    """Each expected count of a source beside the one found; empty for a source the paper does not use.

    Parameters
    ----------
    source : str
    found : dict of str to int
        Counts by the names that :data:`EXPECTED` uses; those it lacks are left out.
    flow : list of dict
        The dataset's cohort flow.
    options : dict
        The options it was prepared with.
    """
    known = EXPECTED.get(source)
    if known is None:
        return []
    return [
        Comparison(
            name,
            found[name],
            count,
            name in known.at_least,
            _explain(name, found, known, flow, options),
        )
        for name, count in known.counts.items()
        if name in found
    ]


def _explain(
    name: str, found: Mapping[str, int], known: Expected, flow: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    difference = found[name] - known.counts[name]
    if difference == 0 or (name in known.at_least and difference > 0):
        return "as expected"
    reasons = []
    if options.get("limit_patients"):
        reasons.append(f"limited to {options['limit_patients']} patients")
    steps = [step for step in flow if name in step]
    if difference > 0:
        reasons.append(f"{difference:,} more: the paper filtered further, or counts other files")
    elif steps:
        reasons.append(_blame(name, known.counts[name], -difference, steps, flow))
    else:
        reasons.append(_follows(found, known))
    if name in known.notes:
        reasons.append(known.notes[name])
    return "; ".join(reasons)


def _follows(found: Mapping[str, int], known: Expected) -> str:
    """Why a vocabulary is smaller: fewer people use fewer codes, or else a filter on codes."""
    for name in ("samples", "patients"):
        if name in known.counts and found.get(name, 0) < known.counts[name]:
            return f"fewer {name} ({found[name]:,} of {known.counts[name]:,}) use fewer codes"
    return "as many people, but fewer codes: filtered, or not in the raw files"


def _blame(
    name: str, expected: int, missing: int, steps: Sequence[Mapping[str, Any]], flow: Sequence[Mapping[str, Any]]
) -> str:
    """Which filter, or which few together, took away what is missing."""
    drops = {
        str(after["step"]): int(before[name]) - int(after[name])
        for before, after in itertools.pairwise(steps)
        if int(before[name]) > int(after[name])
    }
    first = steps[0]
    if name == "samples" and int(first.get("left_out", 0)) and "recordings" not in first:
        drops[str(first["step"])] = int(first["left_out"])
    for size in (1, 2, 3):
        for names in itertools.combinations(drops, size):
            if sum(drops[step] for step in names) == missing:
                return f"exactly what '{' and '.join(names)}' left out ({missing:,})"
    if int(first[name]) < expected:
        beginning = "" if first is flow[0] else f" ({flow[0]['step']}: {_figures(flow[0])})"
        return f"the raw files hold fewer from the start: {int(first[name]):,} at '{first['step']}'{beginning}"
    crossing = next(
        (after for before, after in itertools.pairwise(steps) if int(before[name]) >= expected > int(after[name])), None
    )
    if crossing is None:
        return f"{missing:,} fewer"
    return f"falls below at '{crossing['step']}' ({int(crossing[name]):,} left, {drops[str(crossing['step'])]:,} out)"


def _figures(step: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in step.items() if name not in ("step", "left_out"))


def summarize(folder: str | Path) -> dict[str, Any]:
    """Everything ``manydg inspect`` shows, as JSON values; inputs are not read, so size does not matter."""
    data = open_dataset(folder, verify="sizes")
    provenance = data.info.provenance or Provenance("")
    source = provenance.source
    flow = [step.to_json() for step in data.info.cohort_flow]
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
        "options": dict(provenance.options),
        "files": len(provenance.files),
        "expected": {
            "edition": expected.edition if expected else None,
            "labels_per_sample": dict(expected.labels_per_sample) if expected else {},
            "notes": dict(expected.notes) if expected else {},
            "counts": [
                row.to_json() for row in compare_counts(source, found_counts(data), flow, dict(provenance.options))
            ],
        },
    }


def found_counts(data: DomainDataset) -> dict[str, int]:
    """Counts by the names that expected counts go by."""
    return {"patients": data.n_patients, "samples": len(data)} | vocabulary_sizes(data)


def vocabulary_sizes(data: DomainDataset) -> dict[str, int]:
    """Number of real codes in each vocabulary (the unknown code is none), and in each field of an event vocabulary."""
    sizes = {name: sum(word != "<unknown>" for word in words) for name, words in data.info.vocabularies.items()}
    fields = cast("list[dict[str, Any]]", data.info.settings.get("code_fields", []))
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
