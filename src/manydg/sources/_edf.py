"""EDF and EDF+ read directly: only the channels asked for, through a memory map.

Every field of a header is checked before it is used, so that a damaged file ends in an error that names the file and
what is wrong with it, never in a wrong array. One byte too many shifts every sample after it to about a thousandfold
amplitude, so the size of a file has to be what its header says, to the byte. What real recordings need is tolerated:

- ``-1`` data records, which a recorder leaves that was not stopped properly: as many whole ones as there are;
- whole data records beyond those announced: they are not read, with a warning;
- in names and remarks, letters outside ASCII (``µV``), and NUL where the format has blanks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from manydg.errors import DataError, ManyDGWarning, StorageError

MICROVOLTS = {"uv": 1.0, "µv": 1.0, "μv": 1.0, "mv": 1e3, "v": 1e6, "nv": 1e-3}
PLAUSIBLE_MICROVOLTS = (0.05, 2000.0)
"""How much an electrode on or in a head varies, as the root mean square of an epoch around its mean."""
MOST_OUT_OF_RANGE = 0.01
"""Share of a channel's samples that may be outside the range its header states."""
_FIELDS = (16, 80, 8, 8, 8, 8, 8, 80, 8, 32)


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
        return self.label == "EDF Annotations"


@dataclass(frozen=True)
class EdfHeader:
    """The header of an EDF file, checked against the file's size.

    ``start`` is ``None`` where the file hides or garbles its date.
    """

    path: Path
    start: datetime | None
    records: int
    record_seconds: float
    channels: tuple[EdfChannel, ...]
    continuous: bool

    @property
    def record_samples(self) -> int:
        return sum(channel.samples_per_record for channel in self.channels)

    @property
    def seconds(self) -> float:
        return self.records * self.record_seconds

    @property
    def labels(self) -> list[str]:
        return [channel.label for channel in self.channels if not channel.holds_annotations]

    def rate(self, channel: EdfChannel) -> float:
        """Samples per second of a channel."""
        return channel.samples_per_record / self.record_seconds

    def find(self, label: str) -> EdfChannel:
        """The channel of a name, whatever its case and with or without ``EEG`` in front."""
        matches = [channel for channel in self.channels if _plain(channel.label) == _plain(label)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise DataError(f"{self.path} has {len(matches)} channels called '{label}': it is not clear which is meant")
        raise DataError(f"{self.path} has no channel '{label}'; its channels are {', '.join(self.labels) or 'none'}")


def _plain(label: str) -> str:
    return label.strip().lower().removeprefix("eeg ").replace(" ", "")


def read_header(path: str | Path) -> EdfHeader:
    """Read and check the header of an EDF or EDF+ file."""
    file = Path(path)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            fixed = stream.read(256)
            if len(fixed) < 256 or not fixed.startswith(b"0       "):
                raise DataError(f"{file} is not an EDF file: it does not begin with an EDF header")
            signals = _whole(fixed[252:256], file, "number of signals", low=1, high=4096)
            block = stream.read(256 * signals)
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror or error}") from error
    if len(block) < 256 * signals:
        raise DataError(f"{file} is truncated: it ends within its header ({size} bytes). Download it again")
    _check_text(file, fixed + block)
    return _check(file, size, fixed, _channels(file, block, signals))


def _check_text(file: Path, header: bytes) -> None:
    """Raise if a header is not text throughout: it is shorter or longer than it says, or line ends were converted."""
    control = [at for at, byte in enumerate(header) if 0 < byte < 32 or byte == 127]
    if control:
        raise DataError(
            f"{file} is damaged: its header is not text at byte {control[0]}, as if bytes were inserted or left out "
            "(line ends converted?). Download it again, as a binary file"
        )


def _check(file: Path, size: int, fixed: bytes, channels: tuple[EdfChannel, ...]) -> EdfHeader:
    head = 256 * (len(channels) + 1)
    if _whole(fixed[184:192], file, "header size") != head:
        raise DataError(f"{file}: the header says it is {_text(fixed[184:192])} bytes long, but it has {head}")
    seconds = read_number(fixed[244:252], file, "duration of a data record")
    if seconds < 0 or (seconds == 0 and any(not channel.holds_annotations for channel in channels)):
        raise DataError(f"{file}: a data record cannot last {seconds:g} seconds")
    record_bytes = 2 * sum(channel.samples_per_record for channel in channels)
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
    return EdfHeader(file, _start(fixed), records, seconds, channels, not reserved.startswith("EDF+D"))


def _check_size(file: Path, extra: int, record_bytes: int) -> None:
    if extra % record_bytes:
        raise DataError(
            f"{file} is {extra} bytes longer than its header says: bytes were inserted, so that all samples after them "
            "are wrong (line ends converted?). Download it again, as a binary file"
        )
    if extra:
        warnings.warn(
            f"{file} has {extra // record_bytes} data records more than its header announces: they are not read",
            ManyDGWarning,
            stacklevel=4,
        )


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


def require_rate(header: EdfHeader, channels: Sequence[EdfChannel], rate: float) -> None:
    """Raise unless every channel has this sampling rate."""
    for channel in channels:
        given = header.rate(channel)
        if abs(given - rate) > 1e-6 * rate:
            raise DataError(
                f"{header.path}: channel '{channel.label}' is sampled at {given:g} Hz, expected {rate:g} Hz"
            )


def microvolts_per_unit(header: EdfHeader, channel: EdfChannel) -> float:
    """How many microvolts one physical unit of a channel is."""
    factor = MICROVOLTS.get(channel.unit.strip().lower())
    if factor is None:
        raise DataError(
            f"{header.path}: channel '{channel.label}' is in '{channel.unit}', expected microvolts (uV, mV, V or nV)"
        )
    return factor


def read_epochs(
    header: EdfHeader,
    channels: Sequence[EdfChannel],
    epochs: npt.NDArray[np.int64],
    epoch_samples: int,
    content: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.float32]:
    """Some epochs of some channels, in microvolts.

    Parameters
    ----------
    header : EdfHeader
    channels : sequence of EdfChannel
        Of one sampling rate.
    epochs : array ``(epochs,)``
        Which epochs, counted from the start of the recording, in rising order.
    epoch_samples : int
        How long an epoch is.
    content : array ``(bytes,)``, optional
        The whole file, where it is in memory already.

    Returns
    -------
    array ``(epochs, channels, epoch_samples)`` float32
    """
    if not header.continuous:
        raise DataError(f"{header.path} is a discontinuous recording (EDF+D), which this program does not read")
    records = memory_map(header) if content is None else _records_in(header, content)
    first, last = int(epochs[0]), int(epochs[-1]) + 1
    signals = np.empty((len(epochs), len(channels), epoch_samples), np.float32)
    for row, channel in enumerate(channels):
        gain, shift = _calibration(header, channel)
        per_record = channel.samples_per_record
        if last * epoch_samples > header.records * per_record:
            raise DataError(f"{header.path} has {header.seconds:g} s of signal, fewer than {last} epochs need")
        start = first * epoch_samples // per_record
        stop = -(-last * epoch_samples // per_record)
        flat = records[start:stop, channel.offset : channel.offset + per_record].reshape(-1)
        ahead = first * epoch_samples - start * per_record
        stored = flat[ahead : ahead + (last - first) * epoch_samples].reshape(last - first, epoch_samples)
        chosen = stored if len(epochs) == last - first else stored[epochs - first]
        np.multiply(chosen, np.float32(gain), out=signals[:, row])
        if shift:
            signals[:, row] += np.float32(shift)
    return signals


class AmplitudeCheck:
    """Collects how much some channels vary, and warns of what no electrode records: a wrong unit, or shifted bytes.

    Parameters
    ----------
    header : EdfHeader
    channels : sequence of EdfChannel
    """

    def __init__(self, header: EdfHeader, channels: Sequence[EdfChannel]) -> None:
        self._header, self._channels = header, channels
        self._deviations: list[npt.NDArray[np.float32]] = []
        self._outside, self._samples = np.zeros(len(channels), np.int64), 0
        factors = [microvolts_per_unit(header, channel) for channel in channels]
        ends = [sorted(factor * end for end in c.physical) for c, factor in zip(channels, factors, strict=True)]
        low, high = np.array(ends, np.float32).reshape(-1, 2).T
        margin = (high - low) * np.float32(1e-3)
        self._low, self._high = (low - margin)[:, None], (high + margin)[:, None]

    def add(self, signal: npt.NDArray[np.float32]) -> None:
        """Count some epochs ``(epochs, channels, samples)`` in microvolts."""
        with np.errstate(over="ignore", invalid="ignore"):
            self._deviations.append(signal.std(axis=2))
        self._outside += ((signal < self._low) | (signal > self._high)).sum(axis=(0, 2))
        self._samples += signal.shape[0] * signal.shape[2]

    def warn(self) -> None:
        """Warn of each channel that is not plausible."""
        if not self._samples:
            return
        typical = np.median(np.concatenate(self._deviations), axis=0)
        low, high = PLAUSIBLE_MICROVOLTS
        for channel, rms, outside in zip(self._channels, typical, self._outside / self._samples, strict=True):
            doubt = ""
            if outside > MOST_OUT_OF_RANGE:
                doubt = f"{outside:.0%} of its samples are outside the range that the header states"
            elif rms > high or 0 < rms < low:
                doubt = f"it varies by {rms:.3g} uV (RMS), and electrodes record {low:g} to {high:g}"
            if doubt:
                warnings.warn(
                    f"{self._header.path}: channel '{channel.label}' is not plausible: {doubt}. Check its unit and "
                    "calibration, or download the file again",
                    ManyDGWarning,
                    stacklevel=3,
                )


def _records_in(header: EdfHeader, content: npt.NDArray[np.uint8]) -> npt.NDArray[np.int16]:
    start, count = 256 * (len(header.channels) + 1), header.records * header.record_samples
    if len(content) < start + 2 * count:
        raise StorageError(f"{header.path} has changed while it was read: run the same command again")
    stored: npt.NDArray[np.int16] = content[start : start + 2 * count].view("<i2")
    return stored.reshape(header.records, header.record_samples)


def memory_map(header: EdfHeader) -> npt.NDArray[np.int16]:
    """The stored numbers ``(records, numbers of a record)`` of all channels."""
    shape = (header.records, header.record_samples)
    try:
        return np.memmap(header.path, "<i2", "r", offset=256 * (len(header.channels) + 1), shape=shape)
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
    if not math.isfinite(gain * factor) or abs(gain * factor) * 32768 > 1e30:
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
    records = memory_map(header)
    annotations: list[Annotation] = []
    for record in range(header.records):
        for channel in channels:
            stored = records[record, channel.offset : channel.offset + channel.samples_per_record]
            annotations.extend(_annotations_in(stored.tobytes(), header.path))
    return annotations


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


def write_annotations(path: Path, words: Sequence[str], start: datetime | None, seconds: float) -> None:
    """An EDF+ file of annotations only: one for each run of epochs that have the same words.

    Parameters
    ----------
    path : path
    words : sequence of str
        The text of each epoch.
    start : datetime, optional
        When the recording began; EDF's first day where that is not known.
    seconds : float
        Length of an epoch.
    """
    from edfio import Edf, EdfAnnotation, Patient, Recording

    changes = [k for k in range(len(words)) if k == 0 or words[k] != words[k - 1]]
    notes = [
        EdfAnnotation(first * seconds, (last - first) * seconds, words[first])
        for first, last in zip(changes, [*changes[1:], len(words)], strict=True)
    ]
    moment = start or datetime.combine(date(1985, 1, 1), datetime.min.time())
    recording = Recording(startdate=moment.date())
    Edf([], patient=Patient(), recording=recording, starttime=moment.time(), annotations=notes).write(path)
