"""New nights without a hypnogram: from an EDF recording to a model's inputs, and from probabilities to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manydg.data.dataset import DomainDataset, TargetSpec
from manydg.data.storage import disk_error, write_atomically
from manydg.errors import DataError, StorageError
from manydg.sources._edf import EdfChannel, EdfHeader, microvolts_per_unit, read_epochs, read_header
from manydg.sources._hypnogram import draw_hypnogram, epoch_table, stage_words, write_annotations


@dataclass(frozen=True)
class Recording:
    """A new recording, cut into the epochs a model knows.

    Parameters
    ----------
    path : path
    start : datetime, optional
    signal : array ``(epochs, channels, samples)`` float32
        Microvolts at the model's rate.
    epoch_seconds : float
    """

    path: Path
    start: datetime | None
    signal: npt.NDArray[np.float32]
    epoch_seconds: float

    @property
    def name(self) -> str:
        return self.path.stem


def find_recordings(raw: str | Path) -> list[Path]:
    """The EDF recordings a path names: itself, or all in a folder; files of annotations only are passed by."""
    place = Path(raw)
    if not place.exists():
        raise StorageError(f"there is no file or folder {place}")
    if place.is_file():
        return [place]
    files = sorted(path for path in place.rglob("*") if path.suffix.lower() == ".edf")
    found = [path for path in files if read_header(path).labels]
    if not found:
        raise StorageError(f"{place} holds no EDF recordings")
    return found


def read_recording(path: str | Path, settings: Mapping[str, Any], *, resample: bool = False) -> Recording:
    """Read a recording as a model's inputs.

    Parameters
    ----------
    path : path
        EDF or EDF+, without a hypnogram.
    settings : dict
        ``channels``, ``rate``, ``unit`` and ``epoch_seconds`` of the data the model was trained on, as the dataset's
        ``info["settings"]`` states them.
    resample : bool
        Bring another sampling rate to the model's instead of refusing it.

    Raises
    ------
    DataError
        For other channels, units or rates, with what was expected; a recording shorter than an epoch.
    """
    header = read_header(path)
    channels = [_channel(header, label, settings) for label in settings["channels"]]
    rate, seconds = float(settings["rate"]), float(settings.get("epoch_seconds", 30))
    for channel in channels:
        microvolts_per_unit(header, channel)
    rates = {header.rate(channel) for channel in channels}
    samples = round(rate * seconds)
    if all(abs(found - rate) <= 1e-6 * rate for found in rates):
        epochs = int((header.seconds + 1e-6) // seconds)
        _check_length(header, epochs, seconds)
        signal = read_epochs(header, channels, np.arange(epochs), samples)
    elif resample:
        signal = _resampled(header, channels, rate, seconds, samples)
    else:
        found = ", ".join(f"{value:g}" for value in sorted(rates))
        raise DataError(
            f"{header.path} is sampled at {found} Hz; the model was trained on {rate:g} Hz. "
            "Ask for resampling ('--resample') if that is what you want"
        )
    return Recording(header.path, header.start, signal, seconds)


def _channel(header: EdfHeader, label: str, settings: Mapping[str, Any]) -> EdfChannel:
    try:
        return header.find(label)
    except DataError as error:
        raise DataError(f"{error}. The model was trained on {', '.join(settings['channels'])}") from error


def _check_length(header: EdfHeader, epochs: int, seconds: float) -> None:
    if epochs < 1:
        raise DataError(f"{header.path} lasts {header.seconds:g} s, less than one epoch of {seconds:g} s")


def _resampled(
    header: EdfHeader, channels: Sequence[EdfChannel], rate: float, seconds: float, samples: int
) -> npt.NDArray[np.float32]:
    """Each channel through a polyphase filter, which also keeps what is above the new limit from folding down."""
    from scipy.signal import resample_poly

    epochs = int((header.seconds + 1e-6) // seconds)
    _check_length(header, epochs, seconds)
    signal = np.empty((epochs, len(channels), samples), np.float32)
    for place, channel in enumerate(channels):
        whole = read_epochs(header, [channel], np.arange(header.records), channel.samples_per_record).reshape(-1)
        ratio = Fraction(rate / header.rate(channel)).limit_denominator(1000)
        changed = resample_poly(whole, ratio.numerator, ratio.denominator)[: epochs * samples]
        changed = np.pad(changed, (0, epochs * samples - len(changed)), mode="edge")
        signal[:, place] = changed.reshape(epochs, samples)
    return signal


def as_dataset(recording: Recording, settings: Mapping[str, Any], target: TargetSpec) -> DomainDataset:
    """A recording as a dataset of one patient, to hand to a trained model; its targets mean nothing.

    Parameters
    ----------
    recording : Recording
    settings : dict
        The same that the recording was read with.
    target : TargetSpec
        The target of the model.
    """
    epochs = len(recording.signal)
    return DomainDataset(
        columns={"signal": torch.from_numpy(recording.signal)},
        targets=torch.zeros(epochs, dtype=torch.int64),
        target=target,
        domains=torch.zeros(epochs, dtype=torch.int64),
        patients=np.array([recording.name]),
        times=torch.arange(epochs, dtype=torch.float64) * recording.epoch_seconds,
        info={"settings": dict(settings)},
    )


def write_stages(
    folder: str | Path,
    recording: Recording,
    names: Sequence[str],
    probabilities: npt.NDArray[np.floating],
    more: Mapping[str, Sequence[Any]] | None = None,
) -> list[Path]:
    """Write a recording's stages as CSV, as an EDF+ annotation file and as a picture.

    Parameters
    ----------
    folder : path
    recording : Recording
    names : sequence of str
        The stages, in the order of the probabilities.
    probabilities : array ``(epochs, stages)``
    more : dict, optional
        Further columns of the CSV file, an entry per epoch each.

    Returns
    -------
    list of path
        ``NAME.csv``, ``NAME-Hypnogram.edf`` and ``NAME.png`` in the folder.
    """
    if probabilities.shape != (len(recording.signal), len(names)):
        raise DataError(
            f"{len(recording.signal)} epochs and {len(names)} stages, but probabilities of {probabilities.shape}"
        )
    place = Path(folder)
    table, notes, picture = (place / f"{recording.name}{end}" for end in (".csv", "-Hypnogram.edf", ".png"))
    best = [names[k] for k in probabilities.argmax(axis=1)]
    write_atomically(table, epoch_table(names, probabilities, recording.epoch_seconds, more))
    try:
        write_annotations(notes, stage_words(best), recording.start, recording.epoch_seconds)
        draw_hypnogram(picture, names, probabilities, recording.name, recording.epoch_seconds)
    except OSError as error:
        raise disk_error(error, place) from error
    return [table, notes, picture]
