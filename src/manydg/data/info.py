"""What is known of a dataset besides its arrays: labels, provenance, cohort flow, vocabularies, settings.

These are the typed forms of what ``dataset.json`` holds; each reads itself from JSON values and writes itself as such.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from manydg.errors import DataError
from manydg.files import Json, ParsedJson, as_json, fields_as_json

CLASSES = ("classes", "votes", "binary", "multilabel")
"""Kinds of target with classes or labels."""
KINDS = (*CLASSES, "regression")


@dataclass(frozen=True)
class TargetSpec:
    """What the labels are, as data: their kind and the names of the classes or labels, or of the value.

    Parameters
    ----------
    kind : {"classes", "votes", "binary", "multilabel", "regression"}
        ``classes``: ``(rows,)`` class codes; ``votes``: ``(rows, K)`` expert votes; ``binary``: ``(rows,)`` 0 or 1;
        ``multilabel``: ``(rows, K)`` of 0 and 1; ``regression``: ``(rows,)`` measured values.
    names : tuple of str
        One name per class or label, in code order. A binary target names its negative class first, and a regression
        target has the name of what is measured.
    """

    kind: str
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DataError(f"unknown target kind '{self.kind}'; known: {', '.join(KINDS)}")
        if self.kind == "binary" and len(self.names) != 2:
            raise DataError(f"a binary target has two class names, not {len(self.names)}")
        if self.kind == "regression" and len(self.names) != 1:
            raise DataError(f"a regression target is one value with one name, not {len(self.names)}")
        if len(set(self.names)) != len(self.names):
            raise DataError("class names must be different from one another")

    def __str__(self) -> str:
        return f"regression of {self.names[0]}" if self.kind == "regression" else f"{self.kind} of {self.size}"

    @property
    def size(self) -> int:
        """Number of classes or labels; 1 for a value."""
        return len(self.names)

    @staticmethod
    def from_json(value: ParsedJson) -> TargetSpec:
        """Read it from a dataset's description."""
        names = value["names"]
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError("the names of the classes are not a list of text")
        return TargetSpec(str(value["kind"]), tuple(names))

    def to_json(self) -> dict[str, Json]:
        """As :meth:`from_json` reads it."""
        return {"kind": self.kind, "names": list(self.names)}


@dataclass(frozen=True)
class EventSpec:
    """An event that may befall a patient, and that samples come before or after.

    When it begins is the dataset's metadata ``onset``, at most once in a session.

    - ``name``: The column of the table it was read from.
    - ``horizon``: How long before the onset an alarm counts as a warning of it, in the unit of the dataset's times.
    - ``day``: The length of a day in that unit.
    - ``foresee``: Whether the labels were made from the event: positive within the horizon before onset. Then samples
      from the onset on are not trained on, and are scored apart. Otherwise the labels are the user's, and every sample
      trains.
    """

    name: str
    horizon: float
    day: float
    foresee: bool = True

    def __post_init__(self) -> None:
        if not (0 < self.horizon < math.inf and 0 < self.day < math.inf):
            raise DataError(f"the event '{self.name}' has a horizon of {self.horizon:g}: it must be longer than 0")

    @staticmethod
    def from_json(value: ParsedJson) -> EventSpec:
        return EventSpec(str(value["name"]), float(value["horizon"]), float(value["day"]), bool(value["foresee"]))

    def to_json(self) -> dict[str, Json]:
        return {"name": self.name, "horizon": self.horizon, "day": self.day, "foresee": self.foresee}


@dataclass(frozen=True)
class SourceFile:
    """A file a dataset was made from, without its folder: name, size in bytes and SHA-256 checksum."""

    name: str
    bytes: int
    checksum: str

    @staticmethod
    def from_json(value: ParsedJson) -> SourceFile:
        return SourceFile(str(value["name"]), int(value["bytes"]), str(value["checksum"]))


@dataclass(frozen=True)
class Provenance:
    """Where a dataset came from.

    - ``source``: The name of the raw format, as in ``manydg prepare NAME``.
    - ``program``: The program that prepared it, with its version.
    - ``options``: The options that decided the content, as JSON values.
    - ``synthetic``: Whether the patients were made up. Tables and reports say so; an unmarked dataset may be of either
      kind.
    """

    source: str
    program: str = ""
    files: tuple[SourceFile, ...] = ()
    options: Mapping[str, Json] = field(default_factory=dict)
    synthetic: bool = False

    @staticmethod
    def from_json(value: ParsedJson) -> Provenance:
        files = tuple(SourceFile.from_json(entry) for entry in value.get("files", ()))
        program, options = str(value.get("program", "")), dict(value.get("options", {}))
        return Provenance(str(value["source"]), program, files, options, bool(value.get("synthetic", False)))

    def to_json(self) -> dict[str, Json]:
        return fields_as_json(self, "synthetic")


@dataclass(frozen=True)
class CohortStep:
    """What one filter left, as in the flow chart of a clinical paper.

    - ``step``: The filter in words.
    - ``counts``: Any counts: ``patients``, ``samples``, ``recordings``, ``left_out``, ...
    """

    step: str
    counts: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def from_json(value: ParsedJson) -> CohortStep:
        return CohortStep(str(value["step"]), {name: int(count) for name, count in value.items() if name != "step"})

    def to_json(self) -> dict[str, Json]:
        return {"step": self.step, **self.counts}


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a dataset besides its arrays.

    Parameters
    ----------
    name : str
        What the dataset is called where its folder's name does not say it.
    vocabularies : dict of str to sequence of str
        The words of each coded column, in code order.
    settings : dict
        Plain facts that hold at prediction too, as JSON values: sampling rate, channel names, units, feature names.
    sizes : dict of str to int
        Further counts that a backbone is built from.
    test_patients : tuple of str
        Patients reserved for testing; a split then draws only training and validation.
    sites : dict of str to str
        The hospital, laboratory or other site of each patient, where sites are known.
    provenance : Provenance, optional
    cohort_flow : tuple of CohortStep
    event : EventSpec, optional
        Where samples come before or after an event.
    subgroups : dict of str to sequence of str
        The groups of each column that results are broken down by, in the order of their codes (the metadata
        ``subgroups``).
    other : dict
        Further entries, kept as they are.
    """

    name: str = ""
    vocabularies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    settings: Mapping[str, Json] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    test_patients: tuple[str, ...] = ()
    sites: Mapping[str, str] = field(default_factory=dict)
    provenance: Provenance | None = None
    cohort_flow: tuple[CohortStep, ...] = ()
    event: EventSpec | None = None
    subgroups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    other: Mapping[str, Json] = field(default_factory=dict)

    @property
    def source(self) -> str | None:
        """The raw format the dataset was prepared from, where that is known."""
        return self.provenance.source if self.provenance else None

    @property
    def synthetic(self) -> bool:
        """Whether the patients are known to be made up."""
        return self.provenance is not None and self.provenance.synthetic

    @property
    def session_gap(self) -> float | None:
        """The pause between samples that begins a new session, in the unit of the times, where it is known."""
        gap = self.settings.get("session_gap")
        return float(gap) if isinstance(gap, int | float) else None

    @staticmethod
    def of(value: DatasetInfo | ParsedJson | None) -> DatasetInfo:
        """The typed form of what a user gives: itself, JSON values by name, or nothing."""
        if isinstance(value, DatasetInfo):
            return value
        try:
            return DatasetInfo.from_json(value or {})
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise DataError(
                f"info is not what a dataset can hold ({error!r}): see manydg.data.info.DatasetInfo"
            ) from None

    @staticmethod
    def from_json(value: ParsedJson) -> DatasetInfo:
        """Read it from a dataset's description."""
        known = {entry.name for entry in fields(DatasetInfo)} - {"other"}
        provenance, event = value.get("provenance"), value.get("event")
        return DatasetInfo(
            name=str(value.get("name", "")),
            vocabularies={name: list(words) for name, words in value.get("vocabularies", {}).items()},
            settings=dict(value.get("settings", {})),
            sizes={name: int(size) for name, size in value.get("sizes", {}).items()},
            test_patients=tuple(str(patient) for patient in value.get("test_patients", ())),
            sites={str(patient): str(site) for patient, site in value.get("sites", {}).items()},
            provenance=Provenance.from_json(provenance) if provenance else None,
            cohort_flow=tuple(CohortStep.from_json(step) for step in value.get("cohort_flow", ())),
            event=EventSpec.from_json(event) if event else None,
            subgroups={name: list(map(str, groups)) for name, groups in value.get("subgroups", {}).items()},
            other={key: entry for key, entry in value.items() if key not in known},
        )

    def to_json(self) -> dict[str, Json]:
        """JSON values by name; what is empty is left out, but a prepared dataset always states its settings."""
        always = {*self.other, *(["settings"] if self.provenance else [])}
        content: dict[str, Json] = {
            "name": self.name,
            "vocabularies": {name: list(words) for name, words in self.vocabularies.items()},
            "settings": dict(self.settings),
            "sizes": dict(self.sizes),
            "test_patients": list(self.test_patients),
            "sites": dict(self.sites),
            "provenance": self.provenance.to_json() if self.provenance else None,
            "cohort_flow": [step.to_json() for step in self.cohort_flow],
            "event": self.event.to_json() if self.event else None,
            "subgroups": {name: list(groups) for name, groups in self.subgroups.items()},
            **self.other,
        }
        return {key: value for key, value in content.items() if value or key in always}


@dataclass(frozen=True)
class ArrayFile:
    """What is recorded of a ``.npy`` file: its size, type and shape and, where it was hashed, its checksum."""

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    checksum: str | None = None

    @staticmethod
    def from_json(value: ParsedJson) -> ArrayFile:
        return ArrayFile(int(value["bytes"]), str(value["dtype"]), tuple(value["shape"]), value["checksum"])


def offsets_file(column: str, level: int) -> str:
    """The name of the file with an input column's offsets at a ragged level, counted from 0 at the outermost."""
    return f"inputs.{column}.offsets{'' if level == 0 else level + 1}"


@dataclass(frozen=True)
class DatasetDescription:
    """The content of ``dataset.json``.

    - ``columns``: How many ragged levels each input column has above its items.
    - ``pseudonym_key``: Secret key, in hexadecimal digits, of the patients' pseudonyms.
    - ``files``: The ``.npy`` files by their names without ending.
    """

    samples: int
    patients: int
    target: TargetSpec
    columns: Mapping[str, int]
    pseudonym_key: str
    files: Mapping[str, ArrayFile]
    info: DatasetInfo

    @property
    def content_hash(self) -> str:
        return combine_checksums(self.files, self.target, self.info.event)

    @staticmethod
    def from_json(value: ParsedJson) -> DatasetDescription:
        """Raise a plain error if an entry is missing or does not agree with the others."""
        files = {key: ArrayFile.from_json(entry) for key, entry in value["files"].items()}
        target, info = TargetSpec.from_json(value["target"]), DatasetInfo.from_json(value["info"])
        columns, counts = dict(value["columns"].items()), (value["samples"], value["patients"])
        bytes.fromhex(value["pseudonym_key"])
        if any(type(number) is not int or number < 0 for number in (*columns.values(), *counts)):
            raise ValueError("a count is no whole number")
        needed = {f"inputs.{name}" for name in columns} | {"targets", "domains", "patients"}
        needed |= {offsets_file(name, level) for name, levels in columns.items() for level in range(min(levels, 9))}
        if not needed <= set(files):
            raise KeyError("files")
        description = DatasetDescription(*counts, target, columns, value["pseudonym_key"], files, info)
        if description.content_hash != value["content_hash"]:
            raise ValueError("the content hash is not that of the files")
        return description

    def to_json(self) -> dict[str, Json]:
        return {
            "samples": self.samples,
            "patients": self.patients,
            "target": self.target.to_json(),
            "columns": dict(self.columns),
            "content_hash": self.content_hash,
            "pseudonym_key": self.pseudonym_key,
            "files": as_json(self.files),
            "info": self.info.to_json(),
        }


def combine_checksums(arrays: Mapping[str, ArrayFile], target: TargetSpec, event: EventSpec | None = None) -> str:
    """The content hash of a dataset, from its arrays' types, shapes and checksums, the names of its labels, and the
    event that decides which samples are trained on."""
    parts = {key: [array.dtype, array.shape, array.checksum] for key, array in arrays.items()}
    also = [event.to_json()] if event else []
    text = json.dumps([parts, target.kind, target.names, *also], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
