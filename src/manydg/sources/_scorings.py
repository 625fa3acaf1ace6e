"""Labels of recordings: files of events and stages, a map from their words to classes, and the label of each window.

Read are EDF+ annotations, BIDS ``events.tsv``, tables with an onset in each row or one row an epoch, and the XML of the
NSRR and of Compumedics Profusion. All of them become annotations: an onset and a duration in seconds, and a text.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import numpy.typing as npt

from manydg.errors import ConfigError, DataError
from manydg.files import reading_errors
from manydg.sources._edf import SUFFIXES, Annotation, read_annotations

# Words of tables, in the order in which they are looked for.
_ONSETS = ("onset", "start", "start_time", "starttime", "onset_s", "start_s", "begin", "time", "seconds")
_DURATIONS = ("duration", "duration_s", "length", "dur")
_ENDS = ("end", "stop", "end_time", "endtime", "end_s", "offset")
_LABELS = (
    *("trial_type", "stage", "sleep_stage", "label", "description", "annotation", "event", "class", "type", "value"),
)
_NUMBERS = ("epoch", "epoch_number", "epoch_idx", "row", "index", "")
_NOTHING = ("", "n/a", "na", "nan", "none")
_CLOCK = re.compile(r"(?:\d{4}-\d\d-\d\d[ T])?(\d{1,2}):(\d\d):(\d\d(?:\.\d+)?)")
_DAY = 86_400.0
_LISTED = 12


@dataclass(frozen=True)
class ScoringFormat:
    """What a table of labels does not say itself.

    - ``epoch``: Seconds of a scored epoch, where a file has one row or number for each.
    - ``column``: The column of the label, where its name is not a usual one.
    - ``event_seconds``: Length of an event that states none.
    """

    epoch: float = 30.0
    column: str | None = None
    event_seconds: float | None = None


def read_scoring(path: Path, format: ScoringFormat, start: datetime | None = None) -> list[Annotation]:
    """The annotations of a file of labels.

    - ``start``: When the recording began, where times of the day are to be understood.
    """
    if path.suffix.lower() in SUFFIXES:
        notes = read_annotations(path)
    elif path.suffix.lower() == ".xml":
        notes = _read_xml(path)
    else:
        notes = _read_table(path, format, start)
    for note in notes:
        if not (math.isfinite(note.onset) and math.isfinite(note.duration)) or note.duration < 0:
            raise DataError(f"{path}: an event at {note.onset:g} s lasts {note.duration:g} s: mend the file")
    if format.event_seconds is None:
        return notes
    return [note if note.duration else Annotation(note.onset, format.event_seconds, note.text) for note in notes]


# XML of two vendors

_STAGES = {"0": "Sleep stage W", "5": "Sleep stage R", "6": "Movement time", "9": "Sleep stage ?"}


def _read_xml(path: Path) -> list[Annotation]:
    with reading_errors(path):
        content = path.read_bytes()
    try:
        # Without the zeros that UTF-16 has between letters.
        if b"<!ENTITY" in content.replace(b"\0", b""):
            raise DataError(f"{path} defines entities, which no scoring needs: it is not read")
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{path} is not whole XML ({error}): export it again") from None
    kind = root.tag.rpartition("}")[2]
    if kind == "PSGAnnotation":
        return [_event(event, "EventConcept", path) for event in root.iter("ScoredEvent")]
    if kind == "CMPStudyConfig":
        seconds = _seconds(root.findtext("EpochLength") or "30", path, "epoch length")
        codes = [(stage.text or "").strip() for stage in root.iter("SleepStage")]
        stages = [
            Annotation(k * seconds, seconds, _STAGES.get(code, f"Sleep stage {code}")) for k, code in enumerate(codes)
        ]
        return [*stages, *(_event(event, "Name", path) for event in root.iter("ScoredEvent"))]
    raise DataError(
        f"{path} is XML of another vendor: it begins with <{kind}>. Scorings of the NSRR (<PSGAnnotation>) and of "
        "Compumedics Profusion (<CMPStudyConfig>) are read; export it as CSV with the columns onset, duration and label"
    )


def _event(event: ElementTree.Element, name: str, path: Path) -> Annotation:
    onset, duration = (_seconds(event.findtext(part) or "", path, part.lower()) for part in ("Start", "Duration"))
    return Annotation(onset, duration, (event.findtext(name) or "").strip())


def _seconds(text: str, path: Path, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{path}: an event's {what} reads '{text}', which is no number") from None


# Tables: one row an event, or one row an epoch


@dataclass(frozen=True)
class _Table:
    """Cells of a text file; ``names`` are those of the columns, where it has any."""

    path: Path
    names: tuple[str, ...]
    rows: list[list[str]]

    def column(self, wanted: Iterable[str]) -> int | None:
        plain = [_column_name(name) for name in self.names]
        return next((plain.index(name) for name in wanted if name in plain), None)

    def cells(self, column: int) -> list[str]:
        return [row[column].strip() if column < len(row) else "" for row in self.rows]

    def line(self, row: int) -> int:
        """The number of a row in the file, as editors count."""
        return row + 1 + bool(self.names)


def _column_name(name: str) -> str:
    return re.sub(r"[\s(\[]+", "_", name.strip().lower()).rstrip(")]").removesuffix("_sec")


def _open_table(path: Path) -> _Table:
    with reading_errors(path):
        content = path.read_bytes()
    if b"\0" in content:
        raise DataError(f"{path} is not text: labels are read from EDF+, XML, CSV, TSV and TXT files")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin1")
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{path} is empty: it has no labels")
    mark = max("\t,;", key=lines[0].count)
    try:
        rows = list(csv.reader(io.StringIO("\n".join(lines)), delimiter=mark))
    except csv.Error as error:
        raise DataError(f"{path} is not a table that can be read ({error}): save it as CSV again") from None
    known = {*_ONSETS, *_DURATIONS, *_ENDS, *_LABELS, *_NUMBERS} - {""}
    first = [_column_name(cell) for cell in rows[0]]
    if known & set(first):
        return _Table(path, tuple(cell.strip() for cell in rows[0]), rows[1:])
    return _Table(path, (), rows)


def _read_table(path: Path, format: ScoringFormat, start: datetime | None) -> list[Annotation]:
    table = _open_table(path)
    label = _label_column(table, format)
    onset = table.column(_ONSETS) if table.names else 0 if len(table.rows[0]) >= 3 else None
    texts = table.cells(label)
    if onset is None:
        _check_numbers(table)
        return [Annotation(k * format.epoch, format.epoch, text) for k, text in enumerate(texts)]
    onsets = _times(table, onset, start)
    duration = table.column(_DURATIONS) if table.names else 1
    end = table.column(_ENDS)
    if duration is not None:
        lengths = [
            0.0 if cell.lower() in _NOTHING else _number(table, k, cell) for k, cell in enumerate(table.cells(duration))
        ]
    elif end is not None:
        lengths = [stop - begin for begin, stop in zip(onsets, _times(table, end, start), strict=True)]
    else:
        lengths = [0.0] * len(onsets)
    kept = zip(onsets, lengths, texts, strict=True)
    return [Annotation(*note) for note in kept if note[2].lower() not in ("", "n/a")]


def _label_column(table: _Table, format: ScoringFormat) -> int:
    if format.column is not None:
        if format.column not in table.names:
            there = ", ".join(table.names) or "not named"
            raise DataError(f"{table.path} has no column '{format.column}'; its columns are {there}")
        return table.names.index(format.column)
    if not table.names:
        return len(table.rows[0]) - 1
    column = table.column(_LABELS)
    if column is None:
        raise DataError(
            f"{table.path} has no column of labels that is known; its columns are {', '.join(table.names)}: "
            "name it with '--label-column'"
        )
    return column


def _check_numbers(table: _Table) -> None:
    """Raise if a file with one row an epoch numbers its epochs, and some are missing."""
    column = table.column(_NUMBERS) if table.names else 0 if len(table.rows[0]) == 2 else None
    cells = [] if column is None else table.cells(column)
    if not cells or not all(cell.isdigit() for cell in cells):
        return
    for row, (before, after) in enumerate(itertools.pairwise(cells)):
        if int(after) != int(before) + 1:
            raise DataError(
                f"{table.path}, line {table.line(row + 1)}: epoch {after} follows epoch {before}. A file without "
                "onsets needs one row for each epoch; if these are times, name the columns onset, duration and label"
            )


def _number(table: _Table, row: int, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise DataError(f"{table.path}, line {table.line(row)}: '{cell}' is no number of seconds") from None


def _times(table: _Table, column: int, start: datetime | None) -> list[float]:
    """Seconds since the recording began; times of the day count on from its start, over midnight."""
    cells = table.cells(column)
    if not any(_CLOCK.fullmatch(cell) for cell in cells):
        return [_number(table, row, cell) for row, cell in enumerate(cells)]
    if start is None:
        raise DataError(f"{table.path} states times of the day, but the recording does not say when it began")
    begin, times, before = 3600.0 * start.hour + 60.0 * start.minute + start.second, [], 0.0
    for row, cell in enumerate(cells):
        match = _CLOCK.fullmatch(cell)
        if match is None:
            raise DataError(f"{table.path}, line {table.line(row)}: '{cell}' is no time of the day as the others are")
        seconds = 3600 * int(match[1]) + 60 * int(match[2]) + float(match[3]) - begin
        while seconds < before - _DAY / 2:
            seconds += _DAY
        times.append(seconds)
        before = seconds
    return times


# From the words of a scoring to classes

MOVEMENT, UNSCORED = "\0movement", "\0unscored"
"""In place of a class: a technician saw movement, or gave no stage."""
_WAKE = ("sleep stage w", "w", "wake", "wake|0", "awake", "stage w", "0", "sleep stage 0", "wk")
_REM = ("sleep stage r", "r", "rem", "rem sleep|5", "stage r", "rem sleep", "5", "sleep stage rem", "sleep stage 5")
_NONE = ("sleep stage ?", "?", "unscored", "unscored|9", "unknown", "9", "not scored", "sleep stage 9", "-1", "ns", "u")
_MOVES = ("movement time", "movement", "movement|6", "mt", "m", "sleep stage m", "6", "sleep stage 6")
_NREM = {
    number: tuple(
        word.format(number)
        for word in (
            "sleep stage {0}", "sleep stage n{0}", "n{0}", "s{0}", "stage {0}", "{0}", "nrem{0}", "nrem {0}",
            "stage {0} sleep|{0}", "stage n{0}", "sleep stage s{0}",
        )
    )
    for number in (1, 2, 3, 4)
}  # fmt: skip
_OF_PRESETS: dict[str, dict[str, tuple[str, ...]]] = {
    "aasm": {"W": _WAKE, "N1": _NREM[1], "N2": _NREM[2], "N3": (*_NREM[3], *_NREM[4]), "REM": _REM},
    "rk": {"W": _WAKE, **{f"S{number}": words for number, words in _NREM.items()}, "REM": _REM},
}
PRESETS = {
    preset: {word: name for name, words in (classes | {UNSCORED: _NONE, MOVEMENT: _MOVES}).items() for word in words}
    for preset, classes in _OF_PRESETS.items()
}


@dataclass(frozen=True)
class LabelMap:
    """Which texts mean which class.

    - ``rules`` (str, str): A text, or a pattern such as ``T[12]``, and its class; an empty class leaves those windows
      out. Case does not matter. The first that fits counts.
    - ``preset``: ``aasm`` or ``rk``: for texts that no rule fits.
    """

    rules: tuple[tuple[str, str], ...] = ()
    preset: str | None = None

    @staticmethod
    def of(pairs: Sequence[str], preset: str | None) -> LabelMap:
        """From what the user wrote: ``TEXT=CLASS``, split at the last equals sign."""
        rules = []
        for pair in pairs:
            text, equals, name = pair.rpartition("=")
            if not equals or not text.strip():
                raise ConfigError(f"a label is mapped as 'TEXT=CLASS', and left out as 'TEXT='; got '{pair}'")
            rules.append((text.strip(), name.strip()))
        return LabelMap(tuple(rules), preset)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that are known without any data, in order; none where every text is a class of its own."""
        of_preset = [name for name in PRESETS[self.preset].values() if not name.startswith("\0")] if self.preset else []
        return tuple(dict.fromkeys([*of_preset, *(name for _, name in self.rules if name)]))

    def class_of(self, text: str) -> str | None:
        """The class of a text, :data:`MOVEMENT`, :data:`UNSCORED`, ``""`` (left out), or ``None`` (not known)."""
        plain = " ".join(text.lower().split())
        for known, name in self.rules:
            if plain == " ".join(known.lower().split()) or fnmatchcase(plain, known.lower()):
                return name
        if self.preset:
            return PRESETS[self.preset].get(plain)
        return None if self.rules else text


def suggest_preset(texts: Iterable[str]) -> str | None:
    """``aasm`` where texts name sleep stages: at least two and nothing else, or three beside other remarks.

    Numbers alone suggest nothing. ``aasm`` takes stages 3 and 4 for one.
    """
    plain = {" ".join(text.lower().split()) for text in texts}
    known = PRESETS["aasm"]
    words = {text for text in plain & set(known) if not text.lstrip("-").isdigit()}
    stages = {known[text] for text in words} - {MOVEMENT, UNSCORED}
    return "aasm" if len(stages) >= (2 if plain <= set(known) else 3) else None


def listed(counts: Mapping[str, int]) -> str:
    """Texts with how often each occurs, the most frequent first, a dozen at most."""
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    shown = ", ".join(f"'{text}' ({count:,})" for text, count in ranked[:_LISTED])
    return f"{shown} and {len(ranked) - _LISTED} more" if len(ranked) > _LISTED else shown


# Which windows a label covers


@dataclass(frozen=True)
class Span:
    """A class from one moment to another, in seconds."""

    onset: float
    end: float
    name: str


def spans_of(notes: Iterable[Annotation], labels: LabelMap) -> list[Span]:
    """The annotations that mean a class, movement or no stage."""
    spans = [(note, labels.class_of(note.text)) for note in notes]
    return [Span(note.onset, note.onset + note.duration, name) for note, name in spans if name]


def merged(spans: Iterable[Span], gap: float) -> list[Span]:
    """Spans of one class that touch or overlap, as one; sorted by class, then by time."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.name, span.onset, span.end)):
        last = joined[-1] if joined else None
        if last is not None and last.name == span.name and span.onset <= last.end + gap:
            joined[-1] = Span(last.onset, max(last.end, span.end), span.name)
        else:
            joined.append(span)
    return joined


@dataclass(frozen=True)
class WindowLabels:
    """The label of each window.

    - ``codes`` ``(windows,)``: Positions in ``names``; -1 where no label covers the window.
    - ``others`` ``(windows,)``: Position of a second label that covers it too; -1 where there is none.
    - ``disputed`` ``(windows,)``: Whether another label overlaps a part of the window, by more than a hundredth of it.
    """

    names: tuple[str, ...]
    codes: npt.NDArray[np.int64]
    others: npt.NDArray[np.int64]
    disputed: npt.NDArray[np.bool_]


def label_windows(onsets: npt.NDArray[np.float64], seconds: float, spans: Sequence[Span]) -> WindowLabels:
    """The label that covers all of a window, for each window; ``onsets`` are sorted.

    Examples
    --------
    >>> spans = [Span(0, 40, "W"), Span(40, 60, "W"), Span(60, 100, "N1")]
    >>> label_windows(np.array([0.0, 30.0, 60.0, 90.0]), 30.0, spans).codes.tolist()
    [1, 1, 0, -1]
    """
    slack = 1e-6 * seconds
    names = tuple(sorted({span.name for span in spans}))
    codes, others = np.full(len(onsets), -1, np.int64), np.full(len(onsets), -1, np.int64)
    together = merged(spans, slack)
    for code, name in enumerate(names):
        begin = np.array([span.onset for span in together if span.name == name])
        end = np.array([span.end for span in together if span.name == name])
        last = np.searchsorted(begin, onsets + slack, side="right") - 1
        covered = (last >= 0) & (end[last] >= onsets + seconds - slack)
        others[covered & (codes >= 0)] = code
        codes[covered & (codes < 0)] = code
    disputed, much = np.zeros(len(onsets), bool), 0.01 * seconds
    for span in together:
        if span.end - span.onset > much:
            rows = slice(*np.searchsorted(onsets, [span.onset - seconds + much, span.end - much]))
            disputed[rows] |= (codes[rows] >= 0) & (codes[rows] != names.index(span.name))
    return WindowLabels(names, codes, others, disputed)
