"""EDF, EDF+ and BDF read directly: only the channels asked for, through a memory map.

Every field of a header is checked before it is used, so that a damaged file ends in an error that names the file and
what is wrong with it, never in a wrong array. One byte too many shifts every sample after it to about a thousandfold
amplitude, so the size of a file has to be what its header says, to the byte. What real recordings need is tolerated:

- ``-1`` data records, which a recorder leaves that was not stopped properly: as many whole ones as there are;
- whole data records beyond those announced: they are not read, with a warning;
- in names and remarks, letters outside ASCII (``µV``), and NUL where the format has blanks.

Below the format: channels by name, pattern or derivation (:class:`Montage`), and windows of a recording in microvolts
at one rate, resampled and filtered where that is asked for (:class:`SignalReader`).
"""

from __future__ import annotations

import difflib
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date, datetime
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from manydg.errors import ConfigError, DataError, StorageError, warn
from manydg.files import Json, disk_error

MICROVOLTS = {"uv": 1.0, "µv": 1.0, "μv": 1.0, "mv": 1e3, "v": 1e6, "nv": 1e-3}
PLAUSIBLE_MICROVOLTS = (0.05, 2000.0)
"""How much an electrode on or in a head varies, as the root mean square of an epoch around its mean."""
MOST_OUT_OF_RANGE = 0.01
"""Share of a channel's samples that may be outside the range its header states."""
SUFFIXES = (".edf", ".bdf", ".rec")
_FIELDS = (16, 80, 8, 8, 8, 8, 8, 80, 8, 32)
_BYTES = {b"0       ": 2, b"\xffBIOSEMI": 3}
FIRST_DAY = datetime.combine(date(1985, 1, 1), datetime.min.time())
_JITTER = 1e-3
"""Seconds by which data records that follow each other may seem apart, because their times are rounded."""
_IN_MEMORY = 1 << 28
"""Bytes of a resampled or filtered recording that are kept in memory; a longer one goes to a temporary file."""


@dataclass(frozen=True)
class EdfChannel:
    """One signal of a file: name, unit, calibration, and where its samples are in a data record."""

    label: str
    unit: str
    physical: tuple[float, float]
    digital: tuple[int, int]
    samples_per_record: int
    offset: int

    @property
    def holds_annotations(self) -> bool:
        return self.label in ("EDF Annotations", "BDF Annotations")


@dataclass(frozen=True)
class EdfHeader:
    """The header of an EDF or BDF file, checked against the file's size.

    ``start`` is ``None`` where the file hides or garbles its date, ``person`` empty where it names nobody.
    """

    path: Path
    start: datetime | None
    records: int
    record_seconds: float
    channels: tuple[EdfChannel, ...]
    continuous: bool
    sample_bytes: int = 2
    person: str = ""

    @property
    def record_samples(self) -> int:
        return sum(channel.samples_per_record for channel in self.channels)

    @property
    def seconds(self) -> float:
        return self.records * self.record_seconds

    @property
    def labels(self) -> list[str]:
        return [channel.label for channel in self.channels if not channel.holds_annotations]

    @property
    def start_is_known(self) -> bool:
        """Whether the start is a real moment: anonymised files begin at midnight of the format's first day."""
        return self.start is not None and self.start != FIRST_DAY

    def with_unit(self, unit: str | None) -> EdfHeader:
        """The header with this unit wherever a channel states none that is a voltage."""
        if unit is None:
            return self
        channels = [
            channel if is_voltage(channel) or channel.holds_annotations else replace(channel, unit=unit)
            for channel in self.channels
        ]
        return replace(self, channels=tuple(channels))

    def rate(self, channel: EdfChannel) -> float:
        """Samples per second of a channel."""
        return channel.samples_per_record / self.record_seconds


def _plain(label: str) -> str:
    return label.strip().lower().removeprefix("eeg ").replace(" ", "")


def read_header(path: str | Path) -> EdfHeader:
    """Read and check the header of an EDF, EDF+ or BDF file."""
    file = Path(path)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            fixed = stream.read(256)
            if len(fixed) < 256 or fixed[:8] not in _BYTES:
                raise DataError(f"{file} is not an EDF file: it does not begin with an EDF header")
            signals = _whole(fixed[252:256], file, "number of signals", low=1, high=4096)
            block = stream.read(256 * signals)
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror or error}") from error
    if len(block) < 256 * signals:
        raise DataError(f"{file} is truncated: it ends within its header ({size} bytes). Download it again")
    # Not text throughout: the header is shorter or longer than it says, or line ends were converted.
    if control := re.search(rb"[\x01-\x1f\x7f]", fixed + block):
        raise DataError(
            f"{file} is damaged: its header is not text at byte {control.start()}, as if bytes were inserted or left "
            "out (line ends converted?). Download it again, as a binary file"
        )
    return _check(file, size, fixed, _channels(file, block, signals))


def _check(file: Path, size: int, fixed: bytes, channels: tuple[EdfChannel, ...]) -> EdfHeader:
    head = 256 * (len(channels) + 1)
    if _whole(fixed[184:192], file, "header size") != head:
        raise DataError(f"{file}: the header says it is {_text(fixed[184:192])} bytes long, but it has {head}")
    seconds = read_number(fixed[244:252], file, "duration of a data record")
    if seconds < 0 or (seconds == 0 and any(not channel.holds_annotations for channel in channels)):
        raise DataError(f"{file}: a data record cannot last {seconds:g} seconds")
    sample_bytes = _BYTES[fixed[:8]]
    record_bytes = sample_bytes * sum(channel.samples_per_record for channel in channels)
    stated = _whole(fixed[236:244], file, "number of data records", low=-1)
    present = (size - head) // record_bytes
    if stated > present:
        raise DataError(
            f"{file} is truncated: {stated} data records are announced, {present} are there "
            f"({size} bytes instead of {head + stated * record_bytes}). Download it again"
        )
    records = present if stated == -1 else stated
    if records == 0:
        raise DataError(f"{file} holds no data records")
    _check_size(file, size - head - records * record_bytes, record_bytes)
    reserved = _text(fixed[192:236])
    if "EDF+" in reserved and not fixed[192:].startswith(b"EDF+"):
        raise DataError(f"{file} is damaged: the fields of its header are not at their places. Download it again")
    continuous = not reserved.startswith(("EDF+D", "BDF+D"))
    return EdfHeader(file, _start(fixed), records, seconds, channels, continuous, sample_bytes, _person(fixed[8:88]))


def _person(field: bytes) -> str:
    """The patient's code, the first word of EDF+'s patient field; nothing where it is withheld (``X``)."""
    code, *_ = _text(field).split() or [""]
    return "" if code.upper() == "X" else code


def _check_size(file: Path, extra: int, record_bytes: int) -> None:
    if extra % record_bytes:
        raise DataError(
            f"{file} is {extra} bytes longer than its header says: bytes were inserted, so that all samples after them "
            "are wrong (line ends converted?). Download it again, as a binary file"
        )
    if extra:
        warn(f"{file} has {extra // record_bytes} data records more than its header announces: they are not read")


def _channels(file: Path, block: bytes, signals: int) -> tuple[EdfChannel, ...]:
    columns, at = [], 0
    for width in _FIELDS:
        columns.append([block[at + width * k : at + width * (k + 1)] for k in range(signals)])
        at += width * signals
    labels, _, units, low, high, bottom, top, _, samples, _ = columns
    channels, offset = [], 0
    for k in range(signals):
        label = _text(labels[k])
        count = _whole(samples[k], file, f"samples per record of '{label}'", low=1)
        physical = (read_number(low[k], file, "physical minimum"), read_number(high[k], file, "physical maximum"))
        digital = (_whole(bottom[k], file, "digital minimum"), _whole(top[k], file, "digital maximum"))
        channels.append(EdfChannel(label, _text(units[k]), physical, digital, count, offset))
        offset += count
    return tuple(channels)


def _text(field: bytes) -> str:
    text = field.decode("latin1").strip("\0 ")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def read_number(field: bytes, file: Path, what: str) -> float:
    """The finite number that a field of text holds, from its first character on."""
    if field.startswith((b" ", b"\0")) and field.strip(b"\0 "):
        raise DataError(f"{file} is damaged: its {what} ('{_text(field)}') does not begin where it should")
    try:
        value = float(_text(field))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{file} is damaged: its {what} reads '{_text(field)}', which is no number")
    return value


def _whole(field: bytes, file: Path, what: str, low: int = -(1 << 53), high: int = 1 << 53) -> int:
    value = read_number(field, file, what)
    if value != int(value) or not low <= value <= high:
        raise DataError(f"{file} is damaged: its {what} reads '{_text(field)}'")
    return int(value)


def _start(fixed: bytes) -> datetime | None:
    try:
        start = datetime.strptime(_text(fixed[168:176]) + " " + _text(fixed[176:184]), "%d.%m.%y %H.%M.%S")
    except ValueError:
        return None
    # EDF's two-digit years run from 1985 to 2084.
    return start.replace(year=1900 + start.year % 100 if start.year % 100 >= 85 else 2000 + start.year % 100)


def microvolts_per_unit(header: EdfHeader, channel: EdfChannel) -> float:
    """How many microvolts one physical unit of a channel is."""
    factor = MICROVOLTS.get(channel.unit.strip().lower())
    if factor is None:
        raise DataError(
            f"{header.path}: channel '{channel.label}' is in '{channel.unit}', expected microvolts (uV, mV, V or nV)"
        )
    return factor


def is_voltage(channel: EdfChannel) -> bool:
    """Whether a channel states a unit that is a voltage."""
    return channel.unit.strip().lower() in MICROVOLTS


def read_windows(
    header: EdfHeader,
    channels: Sequence[EdfChannel],
    starts: npt.NDArray[np.int64],
    samples: int,
    content: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.float32]:
    """Some windows of some channels, in microvolts.

    - ``channels``: Of one sampling rate.
    - ``starts`` ``(windows,)``: The first sample of each, counted from the first one stored, in rising order.
    - ``samples``: How long a window is.
    - ``content`` ``(bytes,)``: The whole file, where it is in memory already.
    - returns ``(windows, channels, samples)``
    """
    records = memory_map(header) if content is None else _records_in(header, content)
    first, last = int(starts[0]), int(starts[-1]) + samples
    signals = np.empty((len(starts), len(channels), samples), np.float32)
    for row, channel in enumerate(channels):
        gain, shift = _calibration(header, channel)
        per_record = channel.samples_per_record
        if last > header.records * per_record:
            raise DataError(f"{header.path} has {header.seconds:g} s of signal, fewer than {len(starts)} windows need")
        record, end = first // per_record, -(-last // per_record)
        stored = _stored(header, records, channel, record, end)
        ahead = first - record * per_record
        chosen = _cut(stored[ahead : ahead + last - first], starts - first, samples)
        np.multiply(chosen, np.float32(gain), out=signals[:, row])
        if shift:
            signals[:, row] += np.float32(shift)
    return signals


def _stored(
    header: EdfHeader, records: npt.NDArray[np.int16 | np.uint8], channel: EdfChannel, first: int, end: int
) -> npt.NDArray[np.int16 | np.int32]:
    """The stored numbers of a channel, ``(samples,)``, in some data records."""
    if header.sample_bytes == 2:
        part = records[first:end, channel.offset : channel.offset + channel.samples_per_record]
        return part.reshape(-1)  # type: ignore[return-value]
    start = 3 * channel.offset
    packed = records[first:end, start : start + 3 * channel.samples_per_record].reshape(-1, 3)
    wide = np.zeros((len(packed), 4), np.uint8)
    wide[:, 1:] = packed
    # The three bytes are the upper ones of four, so that shifting them down keeps the sign.
    return np.asarray(wide.view("<i4")[:, 0] >> 8)


def _cut(
    values: npt.NDArray[np.int16 | np.int32 | np.float32], starts: npt.NDArray[np.int64], samples: int
) -> npt.NDArray[np.int16 | np.int32 | np.float32]:
    """Windows ``(windows, samples)`` of a signal; without a copy where each begins where the one before it ends."""
    if (starts == np.arange(len(starts)) * samples).all():
        return values[: len(starts) * samples].reshape(-1, samples)
    return np.lib.stride_tricks.sliding_window_view(values, samples)[starts]


class AmplitudeCheck:
    """Collects how much some channels vary, and warns of what no electrode records: a wrong unit, or shifted bytes."""

    def __init__(self, header: EdfHeader, channels: Sequence[EdfChannel]) -> None:
        self._header, self._channels = header, channels
        self._deviations: list[list[npt.NDArray[np.float32]]] = [[] for _ in channels]
        self._outside, self._samples = np.zeros(len(channels), np.int64), np.zeros(len(channels), np.int64)
        factors = [microvolts_per_unit(header, channel) for channel in channels]
        ends = [sorted(factor * end for end in c.physical) for c, factor in zip(channels, factors, strict=True)]
        low, high = np.array(ends, np.float32).reshape(-1, 2).T
        margin = (high - low) * np.float32(1e-3)
        self._low, self._high = low - margin, high + margin

    def add(self, signal: npt.NDArray[np.float32], channel: EdfChannel | None = None) -> None:
        """Count some epochs ``(epochs, channels, samples)`` in microvolts, of all channels or of one.

        One sample of four is looked at.
        """
        numbers = np.arange(len(self._channels)) if channel is None else np.array([self._channels.index(channel)])
        part = np.ascontiguousarray(signal[..., ::4])
        with np.errstate(over="ignore", invalid="ignore"):
            deviations = part.std(axis=2)
        low, high = self._low[numbers], self._high[numbers]
        if (part.min(axis=(0, 2)) < low).any() or (part.max(axis=(0, 2)) > high).any():
            self._outside[numbers] += ((part < low[:, None]) | (part > high[:, None])).sum(axis=(0, 2))
        self._samples[numbers] += part.shape[0] * part.shape[2]
        for column, number in enumerate(numbers):
            self._deviations[number].append(deviations[:, column])

    def warn(self) -> None:
        """Warn of each channel that is not plausible."""
        low, high = PLAUSIBLE_MICROVOLTS
        for number, channel in enumerate(self._channels):
            if not self._samples[number]:
                continue
            outside = self._outside[number] / self._samples[number]
            typical = np.sort(np.concatenate(self._deviations[number]))
            rms, doubt = typical[len(typical) // 2], ""
            if outside > MOST_OUT_OF_RANGE:
                doubt = f"{outside:.0%} of its samples are outside the range that the header states"
            elif rms > high or 0 < rms < low:
                doubt = f"it varies by {rms:.3g} uV (RMS), and electrodes record {low:g} to {high:g}"
            if doubt:
                warn(
                    f"{self._header.path}: channel '{channel.label}' is not plausible: {doubt}. Check its unit and "
                    "calibration, or download the file again"
                )


def _records_in(header: EdfHeader, content: npt.NDArray[np.uint8]) -> npt.NDArray[np.int16 | np.uint8]:
    start, size = 256 * (len(header.channels) + 1), header.records * header.record_samples * header.sample_bytes
    if len(content) < start + size:
        raise StorageError(f"{header.path} has changed while it was read: run the same command again")
    stored = np.asarray(content)[start : start + size].reshape(header.records, -1)
    return stored.view("<i2") if header.sample_bytes == 2 else stored


def memory_map(header: EdfHeader) -> npt.NDArray[np.int16 | np.uint8]:
    """The data records of all channels: numbers ``(records, samples)`` of EDF, bytes ``(records, bytes)`` of BDF."""
    kind, width = ("<i2", 1) if header.sample_bytes == 2 else ("u1", 3)
    shape = (header.records, header.record_samples * width)
    try:
        return np.asarray(np.memmap(header.path, kind, "r", offset=256 * (len(header.channels) + 1), shape=shape))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {header.path}: {error}") from error


def _calibration(header: EdfHeader, channel: EdfChannel) -> tuple[float, float]:
    (low, high), (bottom, top) = channel.physical, channel.digital
    if top <= bottom or high == low:
        raise DataError(
            f"{header.path}: channel '{channel.label}' cannot be calibrated "
            f"(digital {bottom} to {top} for physical {low:g} to {high:g})"
        )
    factor = microvolts_per_unit(header, channel)
    gain = (high - low) / (top - bottom)
    if not math.isfinite(gain * factor) or abs(gain * factor) * (1 << 23) > 1e30:
        raise DataError(f"{header.path}: channel '{channel.label}' has the impossible range {low:g} to {high:g}")
    return gain * factor, (low - gain * bottom) * factor


# Annotations of EDF+ files: a hypnogram's stages, say.


@dataclass(frozen=True)
class Annotation:
    """A remark in an EDF+ file: when, for how long (0 for a point in time), and its text."""

    onset: float
    duration: float
    text: str


def read_annotations(path: str | Path) -> list[Annotation]:
    """Every annotation of an EDF+ file, in file order; the marks that only keep time are left out."""
    header = read_header(path)
    channels = [channel for channel in header.channels if channel.holds_annotations]
    if not channels:
        raise DataError(f"{header.path} holds no annotations: it is not an EDF+ annotation file")
    blocks = _annotation_blocks(header, channels)
    return [note for block in blocks for note in _annotations_in(block, header.path)]


def _annotation_blocks(header: EdfHeader, channels: Sequence[EdfChannel]) -> Iterator[bytes]:
    """The text of the annotation channels, data record by data record."""
    records, width = memory_map(header), 1 if header.sample_bytes == 2 else 3
    for record in range(header.records):
        for channel in channels:
            start = channel.offset * width
            yield records[record, start : start + channel.samples_per_record * width].tobytes()


@dataclass(frozen=True)
class Segment:
    """A part of a recording without a gap: its first data record, how many, and when it begins, in seconds."""

    first: int
    records: int
    onset: float


def read_segments(header: EdfHeader) -> list[Segment]:
    """The parts of a recording without a gap: one, but for a discontinuous file (EDF+D), whose records state times."""
    channels = [channel for channel in header.channels if channel.holds_annotations][:1]
    if header.continuous:
        onset = _record_onset(next(_annotation_blocks(header, channels)), header) if channels else 0.0
        return [Segment(0, header.records, onset or 0.0)]
    onsets = [_record_onset(block, header) for block in _annotation_blocks(header, channels)]
    if not channels or None in onsets:
        raise DataError(
            f"{header.path} is discontinuous (EDF+D), but its data records do not say when they begin: export it again"
        )
    times = np.array(onsets, np.float64)
    pauses = np.diff(times) - header.record_seconds
    if len(pauses) and pauses.min() < -_JITTER:
        at = int(pauses.argmin())
        raise DataError(f"{header.path} is damaged: data records {at} and {at + 1} overlap in time. Download it again")
    firsts = [0, *(np.flatnonzero(pauses > _JITTER) + 1).tolist()]
    ends = [*firsts[1:], header.records]
    return [Segment(first, end - first, float(times[first])) for first, end in zip(firsts, ends, strict=True)]


def _record_onset(block: bytes, header: EdfHeader) -> float | None:
    """When a data record begins, which the first entry of its annotations says."""
    onset, mark, _ = block.split(b"\0", 1)[0].partition(b"\x14\x14")
    return read_number(onset, header.path, "time of a data record") if mark and onset[:1] in (b"+", b"-") else None


def _annotations_in(block: bytes, path: Path) -> list[Annotation]:
    annotations: list[Annotation] = []
    for entry in block.split(b"\0"):
        if not entry:
            continue
        timing, *texts = entry.split(b"\x14")
        onset, _, duration = timing.partition(b"\x15")
        if not texts or texts[-1] or onset[:1] not in (b"+", b"-"):
            raise DataError(f"{path} is damaged: an annotation is cut off or garbled. Download it again")
        seconds = read_number(onset, path, "annotation onset")
        length = read_number(duration, path, "annotation duration") if duration else 0.0
        annotations.extend(
            Annotation(seconds, length, text.decode("utf-8", "replace").strip()) for text in texts[:-1] if text
        )
    return annotations


def write_annotations(
    path: Path, words: Sequence[str], start: datetime | None, seconds: float, onsets: Sequence[float] | None = None
) -> None:
    """An EDF+ file of annotations only: one for each run of epochs that have the same words.

    - ``words``: The text of each epoch.
    - ``start``: When the recording began; EDF's first day where that is not known.
    - ``seconds``: Length of an epoch.
    - ``onsets``: When each epoch begins, in seconds, where they do not follow one another from 0 on. Of epochs that
      overlap, the part before the next one is annotated.
    """
    from edfio import Edf, EdfAnnotation, Patient, Recording

    begin = [k * seconds for k in range(len(words))] if onsets is None else list(onsets)
    end = [min(at + seconds, after) for at, after in zip(begin, [*begin[1:], math.inf], strict=True)]
    joined = [k > 0 and words[k] == words[k - 1] and begin[k] <= end[k - 1] + _JITTER for k in range(len(words))]
    changes = [k for k, same in enumerate(joined) if not same]
    notes = [
        EdfAnnotation(begin[first], end[last - 1] - begin[first], words[first])
        for first, last in zip(changes, [*changes[1:], len(words)], strict=True)
    ]
    moment = start or FIRST_DAY
    recording = Recording(startdate=moment.date())
    Edf([], patient=Patient(), recording=recording, starttime=moment.time(), annotations=notes).write(path)


# Channels by name, alias, pattern or derivation

_MEAN = re.compile(r"mean\s*\((?P<names>[^()]*)\)", re.IGNORECASE)
_REFERENCE = re.compile(r"[-:](ref|le|avg|ar)$")
_MODALITY = re.compile(r"^(eeg|eog|emg|ecg|ekg|pol)\s+", re.IGNORECASE)
# One electrode, two names: those of the 10-20 system and of its successor, the 10-10 system.
_RENAMED = {"t3": "t7", "t4": "t8", "t5": "p7", "t6": "p8"}


def _bare(label: str) -> str:
    """A label without its modality, its reference and dots after it, by the newer of two names of an electrode."""
    name = _REFERENCE.sub("", _plain(_MODALITY.sub("", label.strip(), count=1)).rstrip("."))
    return _RENAMED.get(name, name)


@dataclass(frozen=True)
class Derivation:
    """One channel of the samples: the mean of some recorded channels, less the mean of some others.

    - ``plus``, ``minus``: Labels of the file; ``minus`` is empty for a channel as it was recorded.
    """

    name: str
    plus: tuple[str, ...]
    minus: tuple[str, ...] = ()

    @property
    def expression(self) -> str:
        """The text from which :class:`Montage` makes it again."""
        sides = [part[0] if len(part) == 1 else f"mean({','.join(part)})" for part in (self.plus, self.minus) if part]
        return f"{self.name}={' - '.join(sides)}"


class Montage:
    """The channels that are wanted of each recording.

    - ``wanted``: ``C4``, ``EEG*``, ``C4-M1``, ``C4 - mean(M1,M2)``, ``EEG* - mean(EEG*)``; ``NAME=`` before it gives it
      a name. A difference that was recorded under its own name is taken as it is.
    - ``aliases``: Further labels by which a channel may be recorded.
    """

    def __init__(self, wanted: Sequence[str], aliases: Mapping[str, Sequence[str]] | None = None) -> None:
        self.wanted = tuple(wanted)
        self._aliases = {_plain(name): tuple(labels) for name, labels in (aliases or {}).items()}

    def derive(self, header: EdfHeader) -> list[Derivation]:
        """What is wanted, made of the channels of a recording; patterns become as many as fit them."""
        labels = _Labels(header)
        derivations = [derivation for text in self.wanted for derivation in self._derive(labels, text)]
        names = [derivation.name for derivation in derivations]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"the channel '{name}' is asked for twice: give one of the two another name (NAME=...)"
                )
        return derivations

    def _derive(self, labels: _Labels, text: str) -> list[Derivation]:
        whole = self._side(labels, text)
        if whole:
            return [Derivation(name, sources) for name, sources in whole]
        name, equals, expression = text.partition("=")
        if equals and name.strip() and expression.strip():
            derived = self._derive_or_alias(labels, name.strip(), expression.strip())
            if len(derived) != 1:
                raise ConfigError(f"'{text}' gives one name to {len(derived)} channels: leave '{name.strip()}=' out")
            return [replace(derived[0], name=name.strip())]
        for dash in re.finditer("-", text):
            left, right = text[: dash.start()].strip(), text[dash.end() :].strip()
            plus, minus = self._side(labels, left), self._side(labels, right)
            if plus and len(minus) == 1:
                one = len(plus) == 1
                return [Derivation(text if one else f"{name}-{right}", side, minus[0][1]) for name, side in plus]
        raise _no_channel(labels.header, text)

    def _derive_or_alias(self, labels: _Labels, name: str, expression: str) -> list[Derivation]:
        """A derivation or, where its channels are not there, what the aliases of its name say."""
        try:
            return self._derive(labels, expression)
        except DataError:
            if _plain(name) in self._aliases and (label := self._label(labels, name)) is not None:
                return [Derivation(name, (label,))]
            raise

    def _side(self, labels: _Labels, text: str) -> list[tuple[str, tuple[str, ...]]]:
        """Channels by what they are called; none where the text names none."""
        mean = _MEAN.fullmatch(text.strip())
        if mean:
            sides = [self._side(labels, part) for part in mean["names"].split(",")]
            averaged = tuple(label for side in sides for _, part in side for label in part)
            return [(text, averaged)] if all(sides) else []
        label = self._label(labels, text)
        if label is not None:
            return [(text, (label,))]
        if not any(letter in text for letter in "*?["):
            return []
        forms: tuple[Callable[[str], str], ...] = (str.lower, _plain)
        every = labels.header.labels
        return [(each, (each,)) for each in every if any(fnmatchcase(form(each), form(text)) for form in forms)]

    def _label(self, labels: _Labels, name: str) -> str | None:
        """The label that a name means: the very same, the same but for case and ``EEG``, an alias, or a like one."""
        for candidate in (name, *self._aliases.get(_plain(name), ())):
            for form, known in labels.by_form.items():
                fitting = known.get(form(candidate), [])
                if len(fitting) > 1:
                    raise DataError(
                        f"{labels.header.path} has {len(fitting)} channels that '{name}' may mean "
                        f"({', '.join(fitting)}): name one as the file does, or use a file in which their names differ"
                    )
                if fitting:
                    return fitting[0]
        return None


class _Labels:
    """The labels of a recording by each of the forms in which they are compared, the strictest first."""

    def __init__(self, header: EdfHeader) -> None:
        self.header, labels = header, header.labels
        self.by_form: dict[Callable[[str], str], dict[str, list[str]]] = {str.strip: {}, _plain: {}, _bare: {}}
        for form, known in self.by_form.items():
            for label in labels:
                known.setdefault(form(label), []).append(label)


def _no_channel(header: EdfHeader, text: str) -> DataError:
    labels = header.labels
    forms = {_bare(label): label for label in labels}
    wanted = [part for part in re.split(r"mean|[-(),=]", text) if part.strip() and _bare(part) not in forms]
    close = [name for part in [text, *wanted] for name in difflib.get_close_matches(_bare(part), forms, 3, 0.5)]
    near = list(dict.fromkeys(forms[name] for name in close))[:4]
    hint = f". Near matches: {', '.join(near)}" if near else ""
    return DataError(f"{header.path} has no channel '{text}'; its channels are {', '.join(labels) or 'none'}{hint}")


# Windows of a recording in microvolts, at one rate, derived and filtered


@dataclass(frozen=True)
class SignalFormat:
    """The signals of a dataset, or those a model was trained on.

    - ``channels``: Their names.
    - ``rate``: Samples per second.
    - ``epoch_seconds``: Length of a window.
    - ``stride_seconds``: From the start of a window to that of the next; by default its length.
    - ``derivations``: How each channel is made (:class:`Montage`); by default it is recorded under its name.
    - ``aliases``: Further labels by which a channel may be recorded.
    - ``low``, ``high``: Limits of the band-pass filter in hertz.
    - ``notch``: Frequency that is filtered out, in hertz.
    - ``assumed_unit``: What a channel is taken to be in that states no voltage.
    - ``resample``: Whether recordings of other rates are brought to this one.
    """

    channels: tuple[str, ...]
    rate: float
    epoch_seconds: float
    stride_seconds: float | None = None
    derivations: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] | None = None
    low: float | None = None
    high: float | None = None
    notch: float | None = None
    assumed_unit: str | None = None
    resample: bool = False

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError(f"a band-pass filter from {self.low:g} to {self.high:g} Hz lets nothing pass")
        half = self.rate / 2
        for name, value in (("low", self.low), ("high", self.high), ("notch", self.notch)):
            if value is not None and not 0 < value < half:
                raise ConfigError(
                    f"a filter at {value:g} Hz ({name}) needs a rate above {2 * value:g} Hz; it is {self.rate:g} Hz"
                )
        if self.samples < 1 or round(self.stride * self.rate) < 1:
            raise ConfigError(f"windows of {self.epoch_seconds:g} s every {self.stride:g} s are too short")

    @staticmethod
    def of(settings: Mapping[str, Json]) -> SignalFormat:
        """From the settings of a dataset."""
        return TypeAdapter(SignalFormat).validate_python(settings)

    def to_json(self) -> dict[str, Json]:
        """The settings of a dataset, without what is as it is by default."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        shown = {name: value for name, value in plain.items() if value not in (None, (), {})}
        names: dict[str, Json] = {name: list(value) for name, value in (self.aliases or {}).items()}
        lists: dict[str, Json] = {name: list(value) for name, value in shown.items() if isinstance(value, tuple)}
        return {**shown, **lists, "unit": "uV", **({"aliases": names} if names else {})}

    @property
    def stride(self) -> float:
        return self.epoch_seconds if self.stride_seconds is None else self.stride_seconds

    @property
    def samples(self) -> int:
        """Samples of a window."""
        return round(self.rate * self.epoch_seconds)

    @property
    def montage(self) -> Montage:
        return Montage(self.derivations or self.channels, self.aliases)


class SignalReader:
    """Windows of one recording as a dataset has them.

    - ``content`` ``(bytes,)``: The whole file, where it is in memory already.
    - ``scratch``: A folder for a temporary file, which recordings need that are long and have to be resampled or
      filtered.
    - ``rates``: The sampling rates of the channels that are read.
    """

    def __init__(
        self,
        header: EdfHeader,
        format: SignalFormat,
        content: npt.NDArray[np.uint8] | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.header, self.format = header.with_unit(format.assumed_unit), format
        self._content, self._scratch = content, scratch
        self.derivations = format.montage.derive(self.header)
        by_label = {channel.label: channel for channel in self.header.channels}
        used = dict.fromkeys(label for each in self.derivations for label in (*each.plus, *each.minus))
        self.channels = [by_label[label] for label in used]
        self.rates = {channel.label: self.header.rate(channel) for channel in self.channels}
        for channel in self.channels:
            microvolts_per_unit(self.header, channel)
        self._amplitudes = AmplitudeCheck(self.header, self.channels)

    @property
    def at_rate(self) -> bool:
        """Whether the channels are recorded at the rate of the format."""
        rate = self.format.rate
        return all(abs(given - rate) <= 1e-6 * rate for given in self.rates.values())

    @property
    def as_recorded(self) -> bool:
        """Whether windows are copied from the file, without any change but that of the unit."""
        filtered = any(value is not None for value in (self.format.low, self.format.high, self.format.notch))
        derived = any(each.minus or len(each.plus) > 1 for each in self.derivations)
        return self.at_rate and not filtered and not derived

    @cached_property
    def segments(self) -> list[Segment]:
        return read_segments(self.header)

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        """First sample and number of samples of each segment, at the format's rate."""
        seconds = self.header.record_seconds
        counts = [math.floor(segment.records * seconds * self.format.rate + 1e-6) for segment in self.segments]
        return [(sum(counts[:k]), count) for k, count in enumerate(counts)]

    def grid(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """First samples and onsets in seconds, ``(windows,)`` each, of the windows that fit into the recording."""
        pieces = []
        for segment, (_, count) in zip(self.segments, self._bounds, strict=True):
            most = math.floor((count - self.format.samples) / (self.format.stride * self.format.rate) + 1e-6) + 1
            pieces.append(segment.onset + np.arange(max(most, 0)) * self.format.stride)
        onsets = np.concatenate(pieces)
        return self.at(onsets)

    def at(self, onsets: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """First samples and onsets of the windows that begin at these times, where the recording has them whole."""
        starts, kept = [], []
        for segment, (first, count) in zip(self.segments, self._bounds, strict=True):
            ahead = np.rint((onsets - segment.onset) * self.format.rate).astype(np.int64)
            inside = (ahead >= 0) & (ahead + self.format.samples <= count)
            starts.append(first + ahead[inside])
            kept.append(onsets[inside])
        return np.concatenate(starts), np.concatenate(kept)

    def windows(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """``(windows, channels, samples)`` float32 in microvolts, of windows in rising order."""
        samples = self.format.samples
        if self.as_recorded:
            signal = read_windows(self.header, self.channels, starts, samples, self._content)
            self._amplitudes.add(signal)
            return signal
        first, end = int(starts[0]), int(starts[-1]) + samples
        cut = [_cut(row[first:end], starts - first, samples) for row in self._whole]
        return np.stack(cut, axis=1).astype(np.float32, copy=False)

    def warn_of_amplitudes(self) -> None:
        """Warn of each channel that was read so far and is not plausible."""
        self._amplitudes.warn()

    @cached_property
    def _whole(self) -> npt.NDArray[np.float32]:
        """All of the recording, ``(channels, samples)``, resampled, derived and filtered segment by segment."""
        whole = self._room(len(self.derivations), sum(count for _, count in self._bounds))
        sides = ["\0".join(side) for each in self.derivations for side in (each.plus, each.minus) if side]
        # Such as a common reference.
        shared = {side for side in sides if sides.count(side) > 1}
        for segment, (first, count) in zip(self.segments, self._bounds, strict=True):
            cache: dict[str, npt.NDArray[np.float32]] = {}
            for row, derivation in enumerate(self.derivations):
                signal = self._mean(derivation.plus, segment, count, cache, shared)
                if derivation.minus:
                    signal = signal - self._mean(derivation.minus, segment, count, cache, shared)
                whole[row, first : first + count] = _filtered(signal, self.format)
        return whole

    def _room(self, channels: int, samples: int) -> npt.NDArray[np.float32]:
        """An empty array ``(channels, samples)``, in memory or, if it is large, in a temporary file."""
        size, folder = 4 * channels * samples, self._scratch or Path(tempfile.gettempdir())
        if size <= _IN_MEMORY:
            return np.empty((channels, samples), np.float32)
        # A mapped file that the disk has no room for would end the process.
        if shutil.disk_usage(folder).free < size:
            raise StorageError(
                f"{self.header.path} needs {size / 1e9:.1f} GB in {folder} while it is resampled or filtered: free "
                "some space, or take fewer channels or a lower rate"
            )
        try:
            with tempfile.TemporaryFile("w+b", dir=folder) as file:
                return np.memmap(file, np.float32, "w+", shape=(channels, samples))
        except OSError as error:
            raise disk_error(error, folder) from error

    def _mean(
        self,
        labels: tuple[str, ...],
        segment: Segment,
        count: int,
        cache: dict[str, npt.NDArray[np.float32]],
        shared: set[str],
    ) -> npt.NDArray[np.float32]:
        key = "\0".join(labels)
        if key in cache:
            return cache[key]
        total = self._resampled(labels[0], segment, count)
        for label in labels[1:]:
            total = total + self._resampled(label, segment, count)
        mean = total / np.float32(len(labels)) if len(labels) > 1 else total
        if key in shared:
            cache[key] = mean
        return mean

    def _resampled(self, label: str, segment: Segment, count: int) -> npt.NDArray[np.float32]:
        """A channel at the format's rate; the polyphase filter keeps what is above the new limit from folding down."""
        channel = next(channel for channel in self.channels if channel.label == label)
        size = channel.samples_per_record
        starts = np.arange(segment.first, segment.first + segment.records) * size
        recorded = read_windows(self.header, [channel], starts, size, self._content)
        self._amplitudes.add(recorded, channel)
        whole = recorded.reshape(-1)
        rate = self.header.rate(channel)
        if abs(rate - self.format.rate) > 1e-6 * rate:
            from scipy.signal import resample_poly

            ratio = Fraction(self.format.rate / rate).limit_denominator(1000)
            whole = resample_poly(whole, ratio.numerator, ratio.denominator)
        return np.pad(whole[:count], (0, max(0, count - len(whole))), mode="edge").astype(np.float32, copy=False)


def _filtered(signal: npt.NDArray[np.float32], format: SignalFormat) -> npt.NDArray[np.float32]:
    """Without what is outside the band and at the notch: Butterworth of order 4 and a notch of Q 30, without delay."""
    if format.low is None and format.high is None and format.notch is None:
        return signal
    from scipy.signal import butter, iirnotch, sosfiltfilt, tf2sos

    stages, edges = [], [edge for edge in (format.low, format.high) if edge is not None]
    if edges:
        kind = "bandpass" if len(edges) == 2 else "lowpass" if format.low is None else "highpass"
        stages.append(butter(4, edges if len(edges) == 2 else edges[0], kind, fs=format.rate, output="sos"))
    if format.notch is not None:
        stages.append(tf2sos(*iirnotch(format.notch, 30, fs=format.rate)))
    sections = np.concatenate(stages)
    ends = min(6 * len(sections) + 3, len(signal) - 1)
    filtered: npt.NDArray[np.float32] = sosfiltfilt(sections, signal.astype(np.float64), padlen=ends).astype(np.float32)
    return filtered
