"""Any EEG or PSG: a folder of EDF, EDF+ or BDF files, or a BIDS dataset.

Channels by name, pattern or derivation, windows of any length, and labels from EDF+ annotations, ``events.tsv``, CSV or
TXT scorings, and the XML of the NSRR and of Compumedics.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.info import DatasetInfo, SourceFile, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError, StorageError, warn
from manydg.files import Json, disk_error, reading_errors
from manydg.jobs import Job, in_this_process
from manydg.sources import (
    KEEP_HELP,
    NewSamples,
    Options,
    SamplePredictions,
    Source,
    SourceDocs,
    TrainedOn,
    option,
    write_prediction_table,
)
from manydg.sources._edf import (
    FIRST_DAY,
    SUFFIXES,
    Annotation,
    EdfHeader,
    Montage,
    SignalFormat,
    SignalReader,
    is_voltage,
    read_header,
    write_annotations,
)
from manydg.sources._preparing import (
    CohortFlow,
    Progress,
    WorkFolder,
    describe_files,
    hashed_meanwhile,
    make_ready,
    map_whole,
    natural,
    run_jobs,
    with_provenance,
    work_folder,
    wrong_folder,
)
from manydg.sources._scorings import (
    MOVEMENT,
    UNSCORED,
    LabelMap,
    ScoringFormat,
    Span,
    WindowLabels,
    label_windows,
    listed,
    merged,
    read_scoring,
    spans_of,
    suggest_preset,
)

_UNUSABLE = ("refuse", "skip")
_BIDS = "bids"
_RULES = (_BIDS, "folder", "file", "header")
_TABLES = (".xml", ".csv", ".tsv", ".txt")
_PART = re.compile(r"[-_. ](psg|eeg|ieeg|signals?)$", re.IGNORECASE)
_NO_ELECTRODES = ("trig", "stim", "misc", "audio", "pd", "resp", "sysclock", "temp", "gsr", "pupil", "eyegaze")
_SUBJECT = re.compile(r"(?:^|_)sub-([^_]+)")
_SESSION = re.compile(r"(?:^|_)ses-([^_]+)")
_BLOCK_BYTES = 3 << 20
_STAGE_WORDS = {name: f"Sleep stage {name}" for name in ("W", "N1", "N2", "N3")} | {"REM": "Sleep stage R"}
_HEIGHT = {"W": 4, "REM": 3, "N1": 2, "N2": 1, "N3": 0}


@dataclass(frozen=True)
class EdfOptions(Options):
    """Which channels, windows, labels and people to read.

    ``label`` pairs are ``TEXT=CLASS``; ``patient`` is ``folder``, ``file``, ``header`` or a regular expression on file
    names whose groups are the patient and the session.
    """

    channels: tuple[str, ...] = option(
        (), help="Channels: names, patterns ('EEG*') or derivations ('C4-M1', 'C4 - mean(M1,M2)', 'EOG=E1-M2').",
        metavar="CHANNEL...", shown_default="all voltages",
    )  # fmt: skip
    alias: tuple[str, ...] = option(
        (), help="Another label of a channel, as 'M1=A1'; repeat it for more.", metavar="NAME=LABEL",
        shown_default="none",
    )  # fmt: skip
    rate: float | None = option(None, help="Resample to this rate in Hz.", low=0.1, shown_default="as recorded")
    bandpass: str | None = option(
        None, help="Band-pass filter in Hz, as '0.3-35'; '0.3-' or '-35' for one side.", metavar="LOW-HIGH",
        shown_default="none",
    )  # fmt: skip
    notch: float | None = option(None, help="Filter out the mains frequency, 50 or 60 Hz.", shown_default="none")
    unit: str | None = option(
        None, help="Unit of channels without a unit of voltage: uV, mV, V or nV.", choices=("uV", "mV", "V", "nV"),
        shown_default="such are refused",
    )  # fmt: skip
    window: float = option(30.0, help="Length of a window in seconds.", low=0.001)
    stride: float | None = option(
        None, help="Seconds between the starts of two windows.", low=0.001, shown_default="the window"
    )
    align: str = option(
        "recording", help="Place windows from the start of the recording, or from the start of each label.",
        choices=("recording", "labels"),
    )  # fmt: skip
    scoring: str | None = option(
        None, help="Name of the file of labels, as '{name}-nsrr.xml'; {name} is the recording's.", metavar="PATTERN",
        shown_default="any file named like the recording, or the annotations in it",
    )  # fmt: skip
    label: tuple[str, ...] = option(
        (), help="Class of a label, as 'Sleep stage 2=N2', or 'Artefact=' to leave it out; repeat it.",
        metavar="TEXT=CLASS", shown_default="each text is a class",
    )  # fmt: skip
    labels: str = option(
        "auto", help="Known labels: aasm or rk (sleep stages), none, or auto: aasm where labels name sleep stages.",
        choices=("auto", "aasm", "rk", "none"),
    )  # fmt: skip
    label_column: str | None = option(
        None, help="Column of the label in tables.", metavar="COL", shown_default="by its name"
    )
    scored_epoch: float = option(30.0, help="Seconds per row, in tables with one row per epoch.", low=0.001)
    event_seconds: float | None = option(
        None, help="Duration of events that have none.", low=0.001, shown_default="it labels nothing"
    )
    overlaps: str = option(
        "refuse", help="refuse, or skip and count, windows that two labels cover.", choices=_UNUSABLE
    )
    classes: tuple[str, ...] | None = option(
        None, help="The classes in code order; others are left out.", metavar="A,B,...", commas=True,
        shown_default="all",
    )  # fmt: skip
    wake_margin: float | None = option(
        None, help="Wakefulness (class W) to keep on either side of sleep.", metavar="MINUTES", shown_default="all",
        low=0,
    )  # fmt: skip
    patient: str | None = option(
        None, help="How to find a recording's patient: folder, file, header, or a regular expression on its file name.",
        metavar="RULE", shown_default="BIDS subject, or folder",
    )  # fmt: skip
    patient_table: Path | None = option(
        None, help="Table of recordings: columns file, patient and, optionally, session.", metavar="FILE",
        shown_default="none",
    )  # fmt: skip
    unusable: str = option(
        "refuse", help="refuse, or skip and count, recordings without the channels or labels, and damaged ones.",
        choices=_UNUSABLE,
    )  # fmt: skip
    limit_patients: int | None = option(None, help="Only the first N patients.", low=1, shown_default="all")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.band()
        aliases(self.alias)
        LabelMap.of(self.label, None)

    def band(self) -> tuple[float | None, float | None]:
        """The limits of the band-pass filter, in hertz."""
        if self.bandpass is None:
            return None, None
        number = r"\s*(\d+\.?\d*|\.\d+)?\s*"
        match = re.fullmatch(f"{number}-{number}", self.bandpass)
        if match is None or not any(match.groups()):
            raise ConfigError(
                f"a band-pass filter is written as LOW-HIGH in Hz, such as '0.3-35'; got '{self.bandpass}'"
            )
        low, high = (float(part) if part else None for part in match.groups())
        return low, high


def aliases(pairs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Further labels of each channel by its name, from ``NAME=LABEL`` pairs."""
    by_name: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        name, equals, label = (part.strip() for part in pair.partition("="))
        if not (name and equals and label):
            raise ConfigError(f"an alias is written as NAME=LABEL, such as 'M1=A1'; got '{pair}'")
        by_name[name] = (*by_name.get(name, ()), label)
    return by_name


KEPT = ("patient", "session", "clock")
"""What may be kept of new recordings beside their predictions."""


@dataclass(frozen=True)
class RecordingOptions(Options):
    """How to read new recordings, and what the tables of predictions show besides."""

    resample: bool = option(False, help="EDF: resample other rates to the model's.")
    alias: tuple[str, ...] = option(
        (), help="EDF: another label of a channel, as 'M1=A1'; repeat it for more.", metavar="NAME=LABEL",
        shown_default="none",
    )  # fmt: skip
    keep: tuple[str, ...] = option((), help=KEEP_HELP, metavar="COL")

    def __post_init__(self) -> None:
        super().__post_init__()
        aliases(self.alias)
        if unknown := [name for name in self.keep if name not in KEPT]:
            raise ConfigError(f"of recordings {', '.join(KEPT)} can be kept, not '{unknown[0]}'")


class Edf(Source[EdfOptions, RecordingOptions]):
    """Recordings of your own as windows with a label each.

    The column ``signal`` is ``(rows, channels, samples)`` float32 in microvolts. A window gets the label that covers
    all of it. A patient's recordings follow each other in time, and no context takes a neighbour over their borders.
    """

    name = "edf"
    options_class = EdfOptions
    prediction_options_class = RecordingOptions
    self_explanatory = False
    general = True
    docs = SourceDocs(
        predicts="your own labels, or sleep stages, from EEG or PSG",
        target="classes",
        page="[edf](datasets/edf.md)",
        task="your own labels or sleep stages",
        files="[EDF, EDF+, BDF or BIDS](docs/datasets/edf.md), with scorings",
    )

    def looks_like(self, folder: Path) -> bool:
        described = any((folder / name).is_file() for name in ("participants.tsv", "dataset_description.json"))
        if described and any(path.is_dir() for path in folder.glob("sub-*")):
            return any(path.suffix.lower() in SUFFIXES for path in folder.glob("sub-*/**/*"))
        return any(path.suffix.lower() in SUFFIXES for path in folder.iterdir())

    def prepare(self, raw: Path, out: Path, options: EdfOptions, *, workers: int = 1, overwrite: bool = False) -> Path:
        raw = raw.absolute()
        make_ready(out, overwrite=overwrite)
        cohort = find_cohort(raw, options)
        chosen = limit(cohort.recordings, options.limit_patients)
        scoring = ScoringFormat(options.scored_epoch, options.label_column, options.event_seconds)
        with work_folder(out, self.name, {"scoring": repr(scoring), "unusable": options.unusable}) as work:
            jobs = [Job(each.name, each.files, (each, scoring, options.unusable == "skip")) for each in chosen]
            surveys = run_jobs(survey, jobs, work, Survey, workers=workers, title="checking recordings")
            plans = _plan(chosen, cohort.headers, surveys, options)
            unusable = set(chosen) - {plan.recording for plan in plans.recordings}
            usable = [each for each in cohort.recordings if each not in unusable]
            flow = cohort_flow(plans, WORDS, usable, left_out=cohort.damaged + len(unusable))
            offsets, gap = _lay_out(plans.recordings, plans.recipe.format)
            patient = "file" if options.patient_table else options.patient or cohort.rule
            settings = {**plans.recipe.format.to_json(), "session_gap": gap, "patient": patient}
            write_dataset(
                out, plans, offsets, DatasetInfo(settings=settings), work, workers=workers, overwrite=overwrite,
                finish=lambda info, files: with_provenance(info, self.name, files, options.to_json(), flow, raw=raw),
            )  # fmt: skip
        return out

    def for_prediction(self, raw: Path, trained: TrainedOn, options: RecordingOptions) -> Iterator[NewSamples]:
        """One person after the other, with all their recordings; files of labels are not needed."""
        self.check_trained_on(trained)
        gap = float(trained.settings.get("session_gap") or 0.0)
        format = format_of(trained.settings, options)
        for person in _by_person(raw, str(trained.settings.get("patient") or "file")):
            recordings = [read_new(each, format, options) for each in person]
            offsets = dict(_follow([(each.name, each.start, each.seconds) for each in recordings], gap))
            yield together(recordings, [offsets[each.name] for each in recordings])

    def write_predictions(self, folder: Path, samples: NewSamples, predictions: SamplePredictions) -> list[Path]:
        """Write ``NAME.csv``, EDF+ annotations (``NAME-Hypnogram.edf`` for stages) and a plot for each recording."""
        written: list[Path] = []
        for part, own in apart(samples, predictions):
            written.append(write_prediction_table(folder, part.rows, own, f"{part.name}.csv"))
            written += write_for_people(folder, part, own, part.rows["onset"].to_numpy())
        return written


# Which files are recordings, whose they are, and which files hold their labels


@dataclass(frozen=True)
class RawRecording:
    """A recording, whose it is, and the files of its labels; without any, they are annotations in the recording."""

    name: str
    patient: str
    session: str
    path: Path
    scorings: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path, *self.scorings)

    @property
    def labels(self) -> Path:
        """The file that holds its labels."""
        return (*self.scorings, self.path)[0]


@dataclass(frozen=True)
class Cohort:
    """The recordings of a folder by person and session, how many files are damaged, and what tells people apart."""

    recordings: tuple[RawRecording, ...]
    headers: Mapping[Path, EdfHeader]
    damaged: int
    rule: str


def find_cohort(raw: Path, options: EdfOptions) -> Cohort:
    """The recordings of a folder and its subfolders, or one file, with their people and labels."""
    headers, damaged = _headers(raw, skip=options.unusable == "skip")
    paths = [path for path, header in headers.items() if header.labels]
    if not paths:
        raise wrong_folder(raw, "EDF, EDF+ or BDF recordings (.edf, .bdf)")
    bids = raw.is_dir() and all(_SUBJECT.match(path.stem) for path in paths)
    rule = options.patient or (_BIDS if bids else "folder")
    table = options.patient_table
    people = (
        _listed_people(table, paths, raw)
        if table
        else {p: patient_and_session(p, raw, rule, headers[p]) for p in paths}
    )
    notes = [path for path, header in headers.items() if not header.labels]
    labels = _scorings_of(raw, notes, people, options.scoring, rule)
    folder = raw if raw.is_dir() else raw.parent
    names = {path: path.relative_to(folder).with_suffix("").as_posix() for path in paths}
    recordings = [RawRecording(names[path], *people[path], path, labels[path]) for path in paths]
    _warn_of_people(recordings, headers)
    if bids:
        _warn_of_participants(raw, recordings)
    ordered = sorted(recordings, key=lambda each: (natural(each.patient), natural(each.session), natural(each.name)))
    return Cohort(tuple(ordered), headers, damaged, rule)


@dataclass(frozen=True)
class BidsChannel:
    """A row of a BIDS ``channels.tsv``, in lower case but for the unit."""

    kind: str
    unit: str
    status: str


def bids_channels(path: Path) -> dict[str, BidsChannel]:
    """The rows of the ``channels.tsv`` of a recording by label; none where there is no such file."""
    if not _SUBJECT.match(path.stem):
        return {}
    rows = _bids_rows(path.with_name(f"{path.stem.rpartition('_')[0]}_channels.tsv"))
    return {
        row["name"]: BidsChannel(row.get("type", "").lower(), row.get("units", ""), row.get("status", "").lower())
        for row in rows
        if row.get("name")
    }


def _bids_start(path: Path) -> datetime | None:
    """When a recording began, by the ``scans.tsv`` of its session."""
    folder = path.parent.parent
    for row in (row for file in folder.glob("sub-*_scans.tsv") for row in _bids_rows(file)):
        if row.get("filename") == f"{path.parent.name}/{path.name}":
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(row.get("acq_time", "")).replace(tzinfo=None)
    return None


def _bids_rows(file: Path) -> list[dict[str, str]]:
    """The cells of a BIDS table by column; none where there is no such file."""
    if not file.is_file():
        return []
    with reading_errors(file), file.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [{name: cell.strip() for name, cell in row.items() if name and isinstance(cell, str)} for row in rows]


def open_header(path: Path) -> EdfHeader:
    """The header of a recording; of BIDS recordings with units and start from the tables beside it if it has none."""
    header = read_header(path)
    if not _SUBJECT.match(path.stem):
        return header
    rows = bids_channels(path)
    start = header.start if header.start_is_known else _bids_start(path) or header.start
    channels = [
        replace(each, unit=rows[each.label].unit) if each.label in rows and not is_voltage(each) else each
        for each in header.channels
    ]
    return replace(header, channels=tuple(channels), start=start)


def _headers(raw: Path, *, skip: bool) -> tuple[dict[Path, EdfHeader], int]:
    if not raw.exists():
        raise StorageError(f"there is no file or folder {raw}")
    headers, damaged = {}, 0
    for path in _edf_files(raw):
        try:
            headers[path] = open_header(path)
        except DataError as error:
            if not skip:
                raise
            warn(f"left out: {error}")
            damaged += 1
    return headers, damaged


def _edf_files(raw: Path) -> list[Path]:
    if raw.is_file():
        return [raw]
    files = (path for path in raw.rglob("*") if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    return sorted(path for path in files if not {"derivatives", "sourcedata"} & set(path.relative_to(raw).parts))


def patient_and_session(path: Path, raw: Path, rule: str, header: EdfHeader) -> tuple[str, str]:
    """The patient and the session of a recording.

    - ``rule``: ``bids``, ``folder``, ``file``, ``header``, or a regular expression with groups for the patient and the
      session.
    """
    if rule == "file":
        return path.stem, ""
    if rule == _BIDS:
        subject, session = _SUBJECT.search(path.stem), _SESSION.search(path.stem)
        return subject[1] if subject else path.stem, session[1] if session else ""
    if rule == "folder":
        parts = path.relative_to(raw).parts if raw.is_dir() else ()
        if len(parts) < 2:
            raise ConfigError(
                f"nothing says whose recording {path.name} is: it is in no folder of a patient. Name a rule: --patient "
                "file (each file is another person), header, or a regular expression such as '(P[0-9]+)'; or give "
                "--patient-table"
            )
        return parts[0], "/".join(parts[1:-1])
    if rule == "header":
        if not header.person:
            raise DataError(f"{path}: its header names no patient. Tell people apart by folder, file, pattern or table")
        return header.person, ""
    return _matched(path, rule)


def _matched(path: Path, rule: str) -> tuple[str, str]:
    try:
        matches = list(re.finditer(rule, path.name))
    except re.error as error:
        raise ConfigError(
            f"--patient '{rule}' is neither folder, file, header nor a regular expression ({error})"
        ) from None
    people: set[tuple[str, str]] = set()
    for match in matches:
        groups, numbered = match.groupdict(), [*match.groups(), None, None]
        patient, session = (groups.get("patient"), groups.get("session")) if groups else numbered[:2]
        people.add((patient or match[0], session or ""))
    if not people:
        raise DataError(
            f"{path}: the pattern '{rule}' finds no patient in the file's name. Widen it, or use --patient-table"
        )
    if len(people) > 1:
        named = " and ".join(sorted(patient for patient, _ in people))
        raise DataError(
            f"{path}: the pattern '{rule}' finds several patients in the file's name ({named}): make it narrower"
        )
    return people.pop()


def _listed_people(table: Path, paths: Sequence[Path], raw: Path) -> dict[Path, tuple[str, str]]:
    """The patient and the session of each recording, by a table of them."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.DictReader(stream, delimiter="\t" if table.suffix.lower() == ".tsv" else ","))
    except FileNotFoundError:
        raise StorageError(f"there is no file {table}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StorageError(f"cannot read {table}: {error}") from error
    people: dict[str, tuple[str, str]] = {}
    for number, row in enumerate(rows, start=2):
        cells = {(name or "").strip().lower(): cell.strip() for name, cell in row.items() if isinstance(cell, str)}
        file = cells.get("file") or cells.get("recording") or cells.get("filename", "")
        person = cells.get("patient", ""), cells.get("session", "")
        if not file or not person[0]:
            raise DataError(f"{table}, line {number}: it needs the columns 'file' and 'patient', both filled in")
        if people.setdefault(file, person) != person:
            raise DataError(
                f"{table}, line {number}: '{file}' is given to two people, {people[file][0]} and {person[0]}"
            )
    named: dict[Path, tuple[str, str]] = {}
    for path in paths:
        names = (path.relative_to(raw).as_posix() if raw.is_dir() else path.name, path.name, path.stem)
        known = next((people[name] for name in names if name in people), None)
        if known is None:
            raise DataError(f"{table} does not say whose recording {path.name} is: add a row for it")
        named[path] = known
    return named


def _warn_of_people(recordings: Sequence[RawRecording], headers: Mapping[Path, EdfHeader]) -> None:
    """Warn where the headers name patients otherwise than the rule: one person on both sides of a split is a leak."""
    codes: dict[str, set[str]] = {}
    people: dict[str, set[str]] = {}
    for each in recordings:
        code = headers[each.path].person
        if code:
            codes.setdefault(each.patient, set()).add(code)
            people.setdefault(code, set()).add(each.patient)
    for named, words in (
        (codes, "recordings of patient '{}' name several people in their headers ({}): two taken for one?"),
        (people, "headers name '{}' in recordings of several patients ({}): one taken for several?"),
    ):
        if mixed := {name: sorted(others) for name, others in named.items() if len(others) > 1}:
            first = min(mixed)
            several = f"{', '.join(mixed[first][:4])}{' ...' if len(mixed[first]) > 4 else ''}"
            warn(f"{words.format(first, several)} ({len(mixed)} such; '--patient header' goes by the headers)")


def _warn_of_participants(raw: Path, recordings: Sequence[RawRecording]) -> None:
    file = raw / "participants.tsv"
    listed_people = {next(iter(row.values()), "").removeprefix("sub-") for row in _bids_rows(file)} - {""}
    if not file.is_file():
        return
    recorded = {each.patient for each in recordings}
    for words, people in (
        ("are listed there but have no recording here", listed_people - recorded),
        ("have recordings but are not listed there", recorded - listed_people),
    ):
        if people:
            warn(f"{file}: {len(people)} people {words} (sub-{min(people)})")


def _scorings_of(
    raw: Path, annotation_files: Sequence[Path], people: Mapping[Path, tuple[str, str]], pattern: str | None, rule: str
) -> dict[Path, tuple[Path, ...]]:
    """The files of labels of each recording."""
    folder = raw if raw.is_dir() else raw.parent
    if rule == _BIDS and pattern is None:
        return {path: _bids_events(path, folder) for path in people}
    tables = (path for path in folder.rglob("*") if path.suffix.lower() in _TABLES and not path.name.startswith("."))
    by_recording: dict[Path, list[Path]] = {path: [] for path in people}
    for candidate in sorted([*tables, *annotation_files]):
        for path in _owners(candidate, people, pattern, rule):
            by_recording[path].append(candidate)
    for path, files in by_recording.items():
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise DataError(
                f"{len(files)} files may hold the labels of {path.name}: {names}. Choose one by its name, as in "
                f"--scoring '{{name}}{files[0].name.removeprefix(path.stem)}'"
            )
        if pattern is not None and not files:
            raise DataError(f"there is no file '{pattern.replace('{name}', path.stem)}' with the labels of {path}")
    return {path: tuple(files) for path, files in by_recording.items()}


def _owners(candidate: Path, people: Mapping[Path, tuple[str, str]], pattern: str | None, rule: str) -> list[Path]:
    """The recordings whose labels a file may hold: those of its name, in its folder if there are any."""
    if pattern is not None:
        named = {path: pattern.replace("{name}", re.sub(r"([*?\[])", r"[\1]", path.stem)) for path in people}
        fitting = [path for path in people if fnmatchcase(candidate.name, named[path])]
    else:
        base, stem = {path: _PART.sub("", path.stem) for path in people}, candidate.stem
        fitting = [p for p in people if stem.startswith(base[p]) and not stem[len(base[p]) :][:1].isalnum()]
        longest = max((len(base[path]) for path in fitting), default=0)
        fitting = [path for path in fitting if len(base[path]) == longest]
        if not fitting and rule not in _RULES:
            # The one recording that the pattern gives the same patient and session.
            with contextlib.suppress(ConfigError, DataError):
                person = _matched(candidate, rule)
                same = [path for path in people if people[path] == person]
                fitting = same if len(same) == 1 else []
    return [path for path in fitting if path.parent == candidate.parent] or fitting


def _bids_events(path: Path, root: Path) -> tuple[Path, ...]:
    """The ``events.tsv`` of a recording, or the nearest one above it that is about recordings of its kind."""
    entities = set(path.stem.split("_")[:-1])
    folder = path.parent
    while True:
        fitting = [file for file in sorted(folder.glob("*events.tsv")) if set(file.stem.split("_")[:-1]) <= entities]
        if fitting:
            return (max(fitting, key=lambda file: len(file.stem.split("_"))),)
        if folder == root or root not in folder.parents:
            return ()
        folder = folder.parent


def limit(recordings: Sequence[RawRecording], patients: int | None) -> tuple[RawRecording, ...]:
    """The recordings of the first so many people."""
    chosen = set(list(dict.fromkeys(each.patient for each in recordings))[:patients])
    return tuple(each for each in recordings if each.patient in chosen)


# What the files of a recording say, file by file


@dataclass(frozen=True)
class Survey:
    """The labels of a recording as its files have them, or why it cannot be used."""

    notes: list[Annotation]
    problem: str = ""


def survey(argument: tuple[RawRecording, ScoringFormat, bool]) -> Survey:
    """Check a recording and read its labels."""
    recording, format, skip = argument
    try:
        return Survey(_read_labels(recording, format))
    except DataError as error:
        if not skip:
            raise
        return Survey([], str(error))


def _read_labels(recording: RawRecording, format: ScoringFormat) -> list[Annotation]:
    header = read_header(recording.path)
    for file in recording.scorings:
        if file.suffix.lower() in SUFFIXES:
            _check_starts(header, read_header(file))
    inside = any(channel.holds_annotations for channel in header.channels)
    files = recording.scorings or ((recording.path,) if inside else ())
    notes = [note for file in files for note in read_scoring(file, format, header.start)]
    if not notes:
        empty = " and ".join(file.name for file in recording.scorings)
        why = f"{empty} states none" if empty else "no file of labels is named like it, and it holds no annotations"
        raise DataError(
            f"{recording.path} has no labels: {why}. Name the file with --scoring, or leave such recordings out with "
            "--unusable skip"
        )
    return notes


def _check_starts(header: EdfHeader, scoring: EdfHeader) -> None:
    start, other = (each.start if each.start_is_known else None for each in (header, scoring))
    if start is None or other is None or start == other:
        return
    # Of an anonymised file the date is the format's first day; the time of day may still be true.
    if FIRST_DAY.date() in (start.date(), other.date()) and start.time() == other.time():
        return
    raise DataError(
        f"{header.path.name} starts at {start:%d.%m.%Y %H:%M:%S}, its hypnogram {scoring.path.name} at "
        f"{other:%d.%m.%Y %H:%M:%S}: they do not belong together. If they do, correct one of the headers"
    )


# Which windows are samples


@dataclass(frozen=True)
class Recipe:
    """What is the same for all recordings.

    - ``classes``: In code order.
    - ``align`` {"recording", "labels"}: Where windows begin.
    - ``overlaps`` {"refuse", "skip"}: What to do with a window that two labels cover.
    - ``wake_margin``: Minutes of the first class to keep on either side of the others.
    """

    format: SignalFormat
    labels: LabelMap
    classes: tuple[str, ...]
    align: str = "recording"
    overlaps: str = "refuse"
    wake_margin: float | None = None


@dataclass(frozen=True)
class Plan:
    """Which windows of a recording are samples.

    - ``seconds``: How long it lasts, gaps included.
    - ``starts``, ``onsets``, ``codes`` ``(samples,)``: First sample, onset in seconds and class of each window.
    - ``counts``: How many windows there are, and how many are left out for which reason.
    """

    recording: RawRecording
    header: EdfHeader
    seconds: float
    starts: npt.NDArray[np.int64]
    onsets: npt.NDArray[np.float64]
    codes: npt.NDArray[np.int64]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Plans:
    """A recipe, and what it makes of each recording."""

    recipe: Recipe
    recordings: tuple[Plan, ...]

    def total(self, reason: str) -> int:
        return sum(plan.counts[reason] for plan in self.recordings)


def plan_recording(recording: RawRecording, header: EdfHeader, notes: Sequence[Annotation], recipe: Recipe) -> Plan:
    """Choose the windows of one recording."""
    reader = SignalReader(header, recipe.format)
    wanted, window = recipe.format.rate, recipe.format.epoch_seconds
    if not recipe.format.resample and not reader.at_rate:
        label, rate = next((name, rate) for name, rate in reader.rates.items() if abs(rate - wanted) > 1e-6 * wanted)
        raise DataError(f"{header.path}: channel '{label}' is sampled at {rate:g} Hz, expected {wanted:g} Hz")
    spans = _checked_spans(recording, notes, recipe)
    if not len(reader.grid()[0]):
        raise DataError(f"{header.path} lasts {header.seconds:g} s, less than one window of {window:g} s")
    starts, onsets = reader.grid() if recipe.align == "recording" else reader.at(_label_grid(spans, recipe.format))
    within = onsets + window <= max(span.end for span in spans) + 1e-6 * window
    if not within.any():
        raise DataError(
            f"{recording.path.name} and the labels in {recording.labels.name} do not overlap by a single window of "
            f"{window:g} s"
        )
    labels = label_windows(onsets, window, spans)
    two = labels.others >= 0
    if two.any() and recipe.overlaps == "refuse":
        raise _two_labels(recording.labels, labels, int(np.flatnonzero(two)[0]), onsets)
    names = np.where(two, "", np.array([*labels.names, ""])[labels.codes])
    staged = np.isin(names, recipe.classes) & within
    kept = staged & _near_sleep(onsets, np.where(staged, names, ""), recipe)
    movement = (names == MOVEMENT) & within
    end = max(segment.onset + segment.records * reader.header.record_seconds for segment in reader.segments)
    late = sum(max(0.0, span.end - max(end, span.onset)) for span in spans if span.name in recipe.classes)
    counts = {
        "windows": int(within.sum()),
        "beyond": int((~within).sum()),
        "movement": int(movement.sum()),
        "two": int((two & within).sum()),
        "disputed": int((kept & ~two & labels.disputed).sum()),
        "unlabelled": int((within & ~staged & ~movement & ~two).sum()),
        "outside_margin": int((staged & ~kept).sum()),
        # Windows of labels that there would be after the end of the signal.
        "without_signal": math.floor(min(late, 1e12) / window + 1e-6),
    }
    codes = np.array([recipe.classes.index(name) for name in names[kept].tolist()], np.int64)
    return Plan(recording, header, end, starts[kept], onsets[kept], codes, counts)


def _checked_spans(recording: RawRecording, notes: Sequence[Annotation], recipe: Recipe) -> list[Span]:
    """The labels of a recording that mean something, one of which is as long as a window."""
    spans, window = spans_of(notes, recipe.labels), recipe.format.epoch_seconds
    if not spans:
        there = listed(Counter(note.text for note in notes))
        raise DataError(f"{recording.labels} has no label that maps to a class; its labels are {there}")
    if max(span.end - span.onset for span in merged(spans, 1e-6 * window)) < window * (1 - 1e-6):
        raise DataError(
            f"not one label in {recording.labels} lasts a window of {window:g} s: use shorter windows (--window), or "
            "give events without a length one (--event-seconds)"
        )
    return spans


def _label_grid(spans: Sequence[Span], format: SignalFormat) -> npt.NDArray[np.float64]:
    """Onsets of windows that begin with a label, then follow each other as long as it lasts."""
    pieces = [
        span.onset
        + np.arange(max(0, math.floor((span.end - span.onset - format.epoch_seconds) / format.stride + 1e-6) + 1))
        * format.stride
        for span in merged(spans, 1e-6 * format.epoch_seconds)
    ]
    return np.unique(np.concatenate(pieces))


def _near_sleep(onsets: npt.NDArray[np.float64], names: npt.NDArray[np.str_], recipe: Recipe) -> npt.NDArray[np.bool_]:
    if recipe.wake_margin is None:
        return np.ones(len(onsets), bool)
    asleep = onsets[(names != recipe.classes[0]) & (names != "")]
    if not len(asleep):
        return np.zeros(len(onsets), bool)
    margin = 60 * recipe.wake_margin + 1e-6
    return np.asarray((onsets >= asleep[0] - margin) & (onsets <= asleep[-1] + margin))


def _two_labels(source: Path, labels: WindowLabels, window: int, onsets: npt.NDArray[np.float64]) -> DataError:
    codes = (labels.codes[window], labels.others[window])
    words = " and ".join(f"'{labels.names[code].strip(chr(0))}'" for code in codes)
    return DataError(
        f"{source} gives two labels to one window, {words} at {onsets[window]:g} s: mend it, or leave such windows out "
        "with --overlaps skip, or one of the labels with --label 'TEXT='"
    )


def _plan(
    recordings: Sequence[RawRecording],
    headers: Mapping[Path, EdfHeader],
    surveys: Sequence[Survey],
    options: EdfOptions,
) -> Plans:
    """What the recordings have in common, and the windows of each."""
    surveyed = list(zip(recordings, surveys, strict=True))
    for _, result in surveyed:
        if result.problem:
            warn(f"left out: {result.problem}")
    usable = [(recording, result) for recording, result in surveyed if not result.problem]
    if not usable:
        raise DataError("not one recording has labels; the lines above say why")
    texts = Counter(note.text for _, result in usable for note in result.notes)
    suggested = None if options.label else suggest_preset(texts)
    labels = LabelMap.of(options.label, {"auto": suggested, "none": None}.get(options.labels, options.labels))
    format = _format([headers[recording.path] for recording, _ in usable], options)
    classes = _classes(labels, texts, options)
    recipe = Recipe(format, labels, classes, options.align, options.overlaps, options.wake_margin)
    plans = []
    for recording, result in usable:
        try:
            plans.append(plan_recording(recording, headers[recording.path], result.notes, recipe))
        except DataError as error:
            if options.unusable == "refuse":
                raise
            warn(f"left out: {error}")
    if not plans:
        raise DataError("not one recording can be used; the lines above say why")
    if options.classes is None:
        recipe, plans = _without_empty(recipe, plans)
    _warn_of_labels(texts, plans, recipe, options)
    _warn_of_bad_channels(plans, format)
    return Plans(recipe, tuple(plans))


def _classes(labels: LabelMap, texts: Mapping[str, int], options: EdfOptions) -> tuple[str, ...]:
    """The classes in code order: as asked for, as in the map, or the texts themselves, sorted."""
    mapped = {labels.class_of(text) for text in texts} - {None, "", MOVEMENT, UNSCORED}
    if not mapped:
        raise DataError(
            f"not one label maps to a class: the labels are {listed(texts)}. Map them with --label 'TEXT=CLASS'"
        )
    if options.classes is not None:
        absent = [name for name in options.classes if name not in mapped]
        if absent:
            raise ConfigError(f"no label means '{absent[0]}'; the labels are {listed(texts)}")
        if len(options.classes) < 2:
            raise ConfigError(f"there is nothing to tell '{options.classes[0]}' from: name two classes or more")
        classes = options.classes
    else:
        ordered = labels.classes or tuple(sorted((str(name) for name in mapped), key=natural))
        classes = tuple(name for name in ordered if name in mapped)
    if options.wake_margin is not None and "W" not in classes:
        raise ConfigError(f"a wake margin needs the class W; the classes are {', '.join(classes)}")
    return classes if options.wake_margin is None else ("W", *(name for name in classes if name != "W"))


def _without_empty(recipe: Recipe, plans: Sequence[Plan]) -> tuple[Recipe, list[Plan]]:
    """Without classes that no window has: remarks such as 'Lights off' are points in time, and label nothing."""
    counts = np.bincount(np.concatenate([plan.codes for plan in plans]), minlength=len(recipe.classes))
    kept = tuple(name for name, count in zip(recipe.classes, counts, strict=True) if count)
    if len(kept) < 2:
        only = f"only '{kept[0]}'" if kept else "none"
        raise DataError(
            f"of the classes {', '.join(recipe.classes)}, {only} covers a whole window of "
            f"{recipe.format.epoch_seconds:g} s: use shorter windows (--window), --align labels, or map the labels "
            "(--label 'TEXT=CLASS')"
        )
    position = np.cumsum(counts > 0) - 1
    return replace(recipe, classes=kept), [replace(plan, codes=position[plan.codes]) for plan in plans]


def _warn_of_labels(texts: Mapping[str, int], plans: Sequence[Plan], recipe: Recipe, options: EdfOptions) -> None:
    unknown = {text: count for text, count in texts.items() if recipe.labels.class_of(text) is None}
    if unknown:
        warn(f"{sum(unknown.values()):,} labels map to no class and are left out: {listed(unknown)}")
    for text, _ in recipe.labels.rules:
        if not any(LabelMap(((text, ""),), None).class_of(each) == "" for each in texts):
            warn(f"--label '{text}=...' has no effect, no label reads so; the labels are {listed(texts)}")
    if recipe.labels.preset and texts.get("4") and not texts.get("5") and "4" not in dict(recipe.labels.rules):
        warn("the label '4' is read as stage 4, and no '5' (REM) occurs: if 4 is REM here, say --label 4=REM")
    for reason, words in {
        "without_signal": "the labels of {recordings} recordings go on after the signal ends, by {windows:,} windows "
        "in all (first: {first}): there is nothing to cut those windows from",
        "disputed": "labels overlap: {windows:,} windows of {recordings} recordings (first: {first}) have a second "
        "label in a part of them, and keep the one that covers all of them",
    }.items():
        if some := [plan for plan in plans if plan.counts[reason]]:
            windows = sum(plan.counts[reason] for plan in some)
            warn(words.format(recordings=len(some), windows=windows, first=some[0].recording.path.name))
    mixed = sum(plan.counts["unlabelled"] for plan in plans) / max(1, sum(plan.counts["windows"] for plan in plans))
    if mixed > 0.5 and options.align == "recording":
        warn(
            f"{mixed:.0%} of the windows are covered by no single label: --align labels begins windows where labels "
            "begin, --window sets their length"
        )


def _format(recorded: Sequence[EdfHeader], options: EdfOptions) -> SignalFormat:
    """The signals that all recordings have: what was asked for, or all voltages they have in common."""
    headers = [header.with_unit(options.unit) for header in recorded]
    wanted = options.channels or _common_channels(headers)
    named = aliases(options.alias)
    derived = None
    for header in headers:
        try:
            derived = Montage(wanted, named).derive(header)
            break
        except DataError:
            if options.unusable == "refuse":
                raise
    if derived is None:
        raise DataError(
            f"not one recording has the channels {', '.join(wanted)}; the first has {', '.join(headers[0].labels)}"
        )
    names, expressions = tuple(each.name for each in derived), tuple(each.expression for each in derived)
    plain = all(each.plus == (each.name,) and not each.minus for each in derived)
    low, high = options.band()
    rate = options.rate or _common_rate(headers, Montage(expressions, named))
    return SignalFormat(
        names, rate, options.window, options.stride, () if plain else expressions, named or None, low, high,
        options.notch, options.unit, options.rate is not None,
    )  # fmt: skip


def _common_channels(headers: Sequence[EdfHeader]) -> tuple[str, ...]:
    """The labels of voltages that every recording has, as the first one orders them."""
    voltages = [_voltages(header) for header in headers]
    common = [label for label in voltages[0] if all(label in labels for labels in voltages)]
    if not common:
        raise DataError(
            f"the recordings have no channel in common; {headers[0].path.name} has "
            f"{', '.join(voltages[0]) or 'no voltages'}. Name the channels (--channels) and their other names (--alias)"
        )
    left = sorted({label for labels in voltages for label in labels} - set(common))
    if left:
        warn(f"channels that not every recording has are left out: {', '.join(left)}")
    return tuple(common)


def _voltages(header: EdfHeader) -> list[str]:
    """The labels of voltages; of BIDS recordings, those that ``channels.tsv`` does not call triggers or the like."""
    rows = bids_channels(header.path)
    labels = [channel.label for channel in header.channels if is_voltage(channel)]
    return [label for label in labels if label not in rows or rows[label].kind not in _NO_ELECTRODES]


def _warn_of_bad_channels(plans: Sequence[Plan], format: SignalFormat) -> None:
    bad: Counter[str] = Counter()
    for plan in plans:
        marked = {label for label, row in bids_channels(plan.recording.path).items() if row.status == "bad"}
        derived = format.montage.derive(plan.header) if marked else []
        bad.update(marked & {label for each in derived for label in (*each.plus, *each.minus)})
    if bad:
        warn(f"channels.tsv calls channels bad that are used: {listed(bad)}")


def _common_rate(headers: Sequence[EdfHeader], montage: Montage) -> float:
    rates: dict[float, list[str]] = {}
    for header in headers:
        try:
            labels = {label for each in montage.derive(header) for label in (*each.plus, *each.minus)}
        except DataError:
            continue
        for channel in header.channels:
            if channel.label in labels:
                rates.setdefault(round(header.rate(channel), 6), []).append(f"{header.path.name}, {channel.label}")
    if len(rates) > 1:
        each = [f"{rate:g} Hz ({len(where)} channels, such as {where[0]})" for rate, where in sorted(rates.items())]
        raise DataError(
            f"the recordings have several rates: {'; '.join(each)}. Bring them to one, as with '--rate {min(rates):g}'"
        )
    return next(iter(rates))


# The dataset


@dataclass(frozen=True)
class FlowWords:
    """What the steps of the cohort flow are called; ``{window}`` is replaced by the length of a window."""

    recordings: str
    windows: str
    labelled: str


WORDS = FlowWords("recordings with labels", "{window} s windows with signal and labels", "with one label throughout")


def cohort_flow(plans: Plans, words: FlowWords, usable: Sequence[RawRecording], *, left_out: int) -> CohortFlow:
    """What each step leaves of the usable recordings, some of which a limit on patients may leave out."""
    kept = [plan.recording for plan in plans.recordings]
    flow, recipe = CohortFlow(), plans.recipe
    flow.add(words.recordings, patients=_people(usable), recordings=len(usable), left_out=left_out)
    if limited := len(usable) - len(kept):
        flow.add("limit on patients", patients=_people(kept), recordings=len(kept), left_out=limited)
    left = plans.total("windows")
    step = words.windows.format(window=f"{recipe.format.epoch_seconds:g}")
    flow.add(step, patients=_people(kept), samples=left, left_out=plans.total("beyond"))
    steps = {"without movement time": "movement"} if recipe.labels.preset else {}
    steps |= {"with no second label": "two"} if plans.total("two") else {}
    steps[words.labelled] = "unlabelled"
    if recipe.wake_margin is not None:
        steps[f"within {recipe.wake_margin:g} minutes of sleep"] = "outside_margin"
    for step, reason in steps.items():
        left -= plans.total(reason)
        flow.add(step, patients=_people(kept), samples=left, left_out=plans.total(reason))
    flow.add("samples", patients=_people([p.recording for p in plans.recordings if len(p.codes)]), samples=left)
    return flow


def _people(recordings: Sequence[RawRecording]) -> int:
    return len({each.patient for each in recordings})


def _lay_out(plans: Sequence[Plan], format: SignalFormat) -> tuple[list[float], float]:
    """Seconds to add to the clock of each recording, and the pause that begins a new session.

    A patient's recordings follow one another, as far apart as they were; between two is a pause that is longer than any
    between samples of one recording. Where one does not say when it began, they follow in the order of their names; one
    that begins before another has ended follows it.
    """
    gap = max(float(np.diff(plan.onsets).max(initial=format.epoch_seconds)) for plan in plans)
    offsets: dict[str, float] = {}
    for patient in dict.fromkeys(plan.recording.patient for plan in plans):
        own = [plan for plan in plans if plan.recording.patient == patient]
        moments = [(p.recording.name, p.header.start if p.header.start_is_known else None, p.seconds) for p in own]
        offsets.update(_follow(moments, gap))
    return [offsets[plan.recording.name] for plan in plans], gap


def _follow(recordings: Sequence[tuple[str, datetime | None, float]], gap: float) -> Iterator[tuple[str, float]]:
    """Each recording's name with its offset, from name, start and length."""
    starts = [start for _, start, _ in recordings if start is not None]
    known = len(set(starts)) == len(recordings)
    ordered = sorted(recordings, key=lambda each: each[1] or datetime.min) if known else list(recordings)
    earliest, before = 0.0, ordered[0][1]
    for name, start, seconds in ordered:
        apart = (start - before).total_seconds() if known and start is not None and before is not None else 0.0
        offset = max(earliest, apart)
        yield name, offset
        earliest = offset + seconds + 2 * gap


@dataclass(frozen=True)
class Checksums:
    """Name, size and checksum of each file of a recording."""

    files: list[SourceFile]


def describe_recording(recording: RawRecording) -> Checksums:
    """Read the files of a recording for their checksums."""
    return Checksums(describe_files(recording.files))


def write_dataset(
    out: Path,
    plans: Plans,
    offsets: Sequence[float],
    info: DatasetInfo,
    work: WorkFolder,
    *,
    workers: int,
    overwrite: bool,
    finish: Callable[[DatasetInfo, list[SourceFile]], DatasetInfo],
) -> None:
    """Write the chosen windows, a recording at a time.

    A recording whose checksums are not known yet is hashed while its windows are written, so that it is read once.
    """
    jobs = [Job(f"checksums of {p.recording.name}", p.recording.files, p.recording) for p in plans.recordings]
    if not in_this_process(workers):
        run_jobs(describe_recording, jobs, work, Checksums, workers=workers, title="checksums")
    classes = plans.recipe.classes
    files: list[SourceFile] = []
    target = TargetSpec("binary" if len(classes) == 2 else "classes", classes)
    progress = Progress("copying signals", total=len(jobs))
    with DatasetWriter(out, target, info, overwrite=overwrite) as writer, progress:
        for job, plan, offset in zip(jobs, plans.recordings, offsets, strict=True):
            known = work.load(job, Checksums)
            if known is None:
                known = _copy_and_hash(writer, plan, plans.recipe.format, offset)
                work.save(job, known)
            else:
                _copy(writer, plan, plans.recipe.format, offset, None)
            files += known.files
            progress.advance()
        writer.info = finish(writer.info, files)


def _copy_and_hash(writer: DatasetWriter, plan: Plan, format: SignalFormat, offset: float) -> Checksums:
    content, digest = map_whole(plan.recording.path), hashlib.sha256()
    with hashed_meanwhile(digest, content.data):
        _copy(writer, plan, format, offset, content)
    signal = SourceFile(plan.recording.path.name, len(content), digest.hexdigest())
    return Checksums([signal, *describe_files(plan.recording.scorings)])


def _copy(
    writer: DatasetWriter, plan: Plan, format: SignalFormat, offset: float, content: npt.NDArray[np.uint8] | None
) -> None:
    reader = SignalReader(plan.header, format, content, writer.folder.absolute().parent)
    # A few megabytes at a time stay in the processor's cache between reading, hashing and writing.
    step = max(1, _BLOCK_BYTES // (4 * len(format.channels) * format.samples))
    for first in range(0, len(plan.starts), step):
        part = slice(first, first + step)
        signal = reader.windows(plan.starts[part])
        times = plan.onsets[part] + offset
        writer.append_immutable({"signal": signal}, plan.codes[part], [plan.recording.patient] * len(signal), times)
    reader.warn_of_amplitudes()


# New recordings, which have no labels


@dataclass(frozen=True)
class Recording(NewSamples):
    """The windows of a new recording.

    - ``start``: When it began.
    - ``epoch_seconds``: Length of a window.
    """

    start: datetime | None = None
    epoch_seconds: float = 30.0

    @property
    def name(self) -> str:
        """The file's, without its ending."""
        return str(self.patients[0])

    @property
    def signal(self) -> npt.NDArray[np.float32]:
        """``(windows, channels, samples)`` in microvolts at the model's rate."""
        return np.asarray(self.columns["signal"])

    @property
    def seconds(self) -> float:
        """From its beginning to the end of its last window."""
        return float(self.rows["onset"][-1]) + self.epoch_seconds


@dataclass(frozen=True)
class Person(NewSamples):
    """The windows of all new recordings of a person, in their order; ``recordings`` are without their signals."""

    recordings: tuple[Recording, ...] = ()


def find_recordings(raw: str | Path) -> list[Path]:
    """The recordings a path names: itself, or all in a folder; files of annotations only are skipped."""
    path = Path(raw)
    if not path.exists():
        raise StorageError(f"there is no file or folder {path}")
    if path.is_file():
        return [path]
    recordings = [file for file in _edf_files(path) if read_header(file).labels]
    if not recordings:
        raise StorageError(f"{path} holds no EDF recordings")
    return recordings


def read_new(raw: RawRecording, trained: SignalFormat, options: RecordingOptions) -> Recording:
    """A new recording, with the columns to keep beside the number and the onset of each window."""
    recording = read_recording(raw.path, trained, resample=options.resample, name=raw.name)
    if not options.keep:
        return recording
    begin = recording.start
    if begin is None and "clock" in options.keep:
        raise DataError(f"{raw.path} does not say when it began, so that no clock time can be kept: leave it out")
    onset = pl.duration(milliseconds=(pl.col("onset") * 1000).round().cast(pl.Int64))
    known = {
        "patient": pl.lit(raw.patient or None, pl.String),
        "session": pl.lit(raw.session or None, pl.String),
        "clock": (pl.lit(begin, pl.Datetime("ms")) + onset).dt.strftime("%Y-%m-%d %H:%M:%S%.3f"),
    }
    return replace(recording, rows=recording.rows.with_columns(known[name].alias(name) for name in options.keep))


def by_name(raw: Path) -> dict[str, Path]:
    """The recordings that a path names, by names that differ, after which the files of their predictions are named."""
    paths = find_recordings(raw)
    stems = Counter(path.stem for path in paths)
    recordings: dict[str, Path] = {}
    for path in paths:
        folders = path.relative_to(raw).parent.parts if stems[path.stem] > 1 else ()
        name = "_".join([*folders, path.stem])
        if name in recordings:
            raise DataError(f"the predictions of {recordings[name]} and {path} would have the same name: rename one")
        recordings[name] = path
    return recordings


def _by_person(raw: Path, rule: str) -> list[list[RawRecording]]:
    """The recordings of each person; where the rule says nothing of a file, it is a person's."""
    people: dict[str, list[RawRecording]] = {}
    for name, path in by_name(raw).items():
        try:
            patient, session = patient_and_session(path, raw, rule, read_header(path))
        except (ConfigError, DataError):
            patient, session = "", ""
        people.setdefault(patient or f"\0{path}", []).append(RawRecording(name, patient, session, path))
    return list(people.values())


def format_of(settings: Mapping[str, Json], options: RecordingOptions) -> SignalFormat:
    """The signals that a model was trained on, with further labels of its channels."""
    format = SignalFormat.of(settings)
    more = aliases(options.alias)
    return replace(format, aliases={**(format.aliases or {}), **more}) if more else format


def read_recording(
    path: str | Path, trained: SignalFormat, *, resample: bool = False, name: str | None = None
) -> Recording:
    """Read a recording as a model's inputs.

    - ``path``: EDF, EDF+ or BDF; labels are not needed.
    - ``trained``: Of the data the model was trained on.
    - ``resample``: Bring another sampling rate to the model's instead of refusing it.
    - ``name``: What the recording is called; by default the file's name.
    - raises DataError: For other channels, units or rates, with what was expected; a recording shorter than a window.
    """
    header = open_header(Path(path))
    try:
        reader = SignalReader(header, trained)
    except DataError as error:
        raise DataError(f"{error}. The model was trained on {', '.join(trained.channels)}") from error
    if not (reader.at_rate or resample or trained.resample):
        given = ", ".join(f"{value:g}" for value in sorted(set(reader.rates.values())))
        raise DataError(
            f"{header.path} is sampled at {given} Hz; the model was trained on {trained.rate:g} Hz. "
            "Ask for resampling ('--resample') if that is what you want"
        )
    starts, onsets = reader.grid()
    if not len(starts):
        raise DataError(f"{header.path} lasts {header.seconds:g} s, less than one epoch of {trained.epoch_seconds:g} s")
    signal = reader.windows(starts)
    reader.warn_of_amplitudes()
    called = name or header.path.stem
    return Recording(
        columns={"signal": torch.from_numpy(signal)},
        rows=pl.DataFrame({"recording": [called] * len(starts), "row": np.arange(len(starts)), "onset": onsets}),
        patients=np.full(len(starts), called),
        times=onsets,
        origin=header.path,
        start=header.start,
        epoch_seconds=trained.epoch_seconds,
    )


def together(recordings: Sequence[Recording], offsets: Sequence[float]) -> Person:
    """The recordings of a person as one set of samples, laid out in time as those a model was trained on."""
    signals = [torch.as_tensor(each.signal) for each in recordings]
    rows = pl.concat([each.rows for each in recordings])
    return Person(
        columns={"signal": signals[0] if len(signals) == 1 else torch.cat(signals)},
        rows=rows,
        patients=np.full(len(rows), recordings[0].name),
        times=np.concatenate(
            [np.asarray(each.times) + offset for each, offset in zip(recordings, offsets, strict=True)]
        ),
        recordings=tuple(replace(each, columns={}) for each in recordings),
    )


# Predictions for people to read


def apart(samples: NewSamples, predictions: SamplePredictions) -> Iterator[tuple[Recording, SamplePredictions]]:
    """Each of a person's recordings, or the one recording, with its own predictions."""
    assert isinstance(samples, Person | Recording)
    first = 0
    for part in samples.recordings if isinstance(samples, Person) else (samples,):
        rows = slice(first, first + len(part.rows))
        yield part, predictions.some(rows)
        first = rows.stop


def write_for_people(
    folder: Path, recording: Recording, predictions: SamplePredictions, onsets: npt.NDArray[np.float64] | None = None
) -> list[Path]:
    """Write EDF+ annotations, sleep stages in the words of EDF+ and other classes by their names, and a plot."""
    names, name, seconds = predictions.target.names, recording.name, recording.epoch_seconds
    staged = set(names) <= set(_STAGE_WORDS)
    words = _STAGE_WORDS if staged else {each: each for each in names}
    nothing = "Sleep stage ?" if staged else "not predicted"
    notes, plot = folder / f"{name}-{'Hypnogram' if staged else 'annotations'}.edf", folder / f"{name}.png"
    try:
        texts = [nothing if decision is None else words[decision] for decision in predictions.decisions]
        write_annotations(notes, texts, recording.start, seconds, None if onsets is None else onsets.tolist())
        plot_hypnogram(plot, names, predictions.probabilities, name, seconds, onsets)
    except OSError as error:
        raise disk_error(error, folder) from error
    return [notes, plot]


def plot_hypnogram(
    path: Path,
    names: Sequence[str],
    probabilities: npt.NDArray[np.floating],
    title: str,
    seconds: float,
    onsets: npt.NDArray[np.float64] | None = None,
) -> None:
    """Classes over the hours of the recording, and below them how sure the model is."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    order = sorted(range(len(names)), key=lambda k: _HEIGHT.get(names[k], -k))
    level = np.empty(len(names))
    level[order] = np.arange(len(names))
    begin = np.arange(len(probabilities)) * seconds if onsets is None else onsets
    hours = np.append(begin, begin[-1] + seconds) / 3600
    known = np.isfinite(probabilities).all(axis=1)
    best = np.where(known, level[probabilities.argmax(axis=1)], np.nan)
    shares = np.where(known[:, None], probabilities, 0.0)
    # A dollar in a name is a dollar, not the beginning of a formula.
    with mpl.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(12, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        upper.stairs(best, hours, baseline=None, color="#1f4e79", linewidth=1)
        upper.set_yticks(range(len(names)), [names[k] for k in order])
        upper.set_ylim(-0.5, len(names) - 0.5)
        upper.set_title(title, loc="left")
        edges = np.repeat(hours, 2)[1:-1]
        lower.stackplot(edges, np.repeat(shares[:, order].T, 2, axis=1), labels=[names[k] for k in order])
        lower.set(
            xlabel="hours since the recording began", ylabel="probability", ylim=(0, 1), xlim=(0, float(hours[-1]))
        )
        lower.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, frameon=False)
        figure.savefig(path, dpi=120)
