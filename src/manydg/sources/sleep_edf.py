"""Sleep-EDF: nights of EEG to 30 s epochs of five stages.

Sleep-EDF Expanded (PhysioNet ``sleep-edfx`` 1.0.0): polysomnograms of two nights a person as EDF files, each with a
hypnogram as EDF+ annotations. Open Data Commons Attribution License 1.0. Kemp, Zwinderman, Tuk, Kamphuisen and Oberyé,
"Analysis of a sleep-dependent neuronal feedback loop", IEEE Transactions on Biomedical Engineering 47(9), 2000;
Goldberger et al., "PhysioBank, PhysioToolkit, and PhysioNet", Circulation 101(23), 2000.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from pydantic import TypeAdapter

from manydg.data.info import DatasetInfo, SourceFile, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError, StorageError, csv_text
from manydg.files import Json, disk_error, write_atomically
from manydg.jobs import Job, in_this_process
from manydg.sources._edf import (
    AmplitudeCheck,
    Annotation,
    EdfChannel,
    EdfHeader,
    microvolts_per_unit,
    read_annotations,
    read_epochs,
    read_header,
    require_rate,
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
    run_jobs,
    with_provenance,
    work_folder,
    wrong_folder,
)
from manydg.sources._source import (
    NewSamples,
    Options,
    PublishedCounts,
    SamplePredictions,
    Source,
    SourceDocs,
    TrainedOn,
    option,
)

CHANNELS = ("EEG Fpz-Cz", "EEG Pz-Oz")
RATE = 100.0
EPOCH_SECONDS = 30
EPOCH_SAMPLES = 3000
STAGES = ("W", "N1", "N2", "N3", "REM")
SETTINGS: dict[str, Json] = {"rate": RATE, "channels": list(CHANNELS), "unit": "uV", "epoch_seconds": EPOCH_SECONDS}
UNSCORED, MOVEMENT = -1, -2

_CODES = {
    "sleep stage w": 0,
    "sleep stage 1": 1,
    "sleep stage n1": 1,
    "sleep stage 2": 2,
    "sleep stage n2": 2,
    "sleep stage 3": 3,
    "sleep stage 4": 3,
    "sleep stage n3": 3,
    "sleep stage r": 4,
    "sleep stage ?": UNSCORED,
    "movement time": MOVEMENT,
}
_NAME = re.compile(r"(?P<study>SC4|ST7)(?P<subject>\d\d)(?P<night>\d)\w\w-(?P<part>PSG|Hypnogram)\.edf", re.IGNORECASE)
_STUDIES = {"cassette": ("SC4",), "telemetry": ("ST7",), "both": ("SC4", "ST7")}
_WORDS = {name: f"Sleep stage {name}" for name in ("W", "N1", "N2", "N3")} | {"REM": "Sleep stage R"}
_NO_STAGE = "Sleep stage ?"
_HEIGHT = {"W": 4, "REM": 3, "N1": 2, "N2": 1, "N3": 0}
_BLOCK = 128


@dataclass(frozen=True)
class SleepEdfOptions(Options):
    """Which recordings and epochs to use."""

    limit_patients: int | None = option(None, help="Take only the first so many patients.", low=1, shown_default="all")
    wake_margin: float | None = option(
        None, help="Wakefulness to keep on either side of sleep.", metavar="MINUTES", shown_default="all"
    )
    study: str = option("cassette", help="cassette, telemetry or both.")
    unpaired: str = option("refuse", help="refuse or skip a PSG without hypnogram, or the reverse.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wake_margin is not None and not 0 <= self.wake_margin < 10_000:
            raise ConfigError(f"the wake margin is a number of minutes, 0 or more; not {self.wake_margin:g}")
        if self.unpaired not in ("refuse", "skip"):
            raise ConfigError(f"unpaired files can be met with 'refuse' or 'skip', not '{self.unpaired}'")
        if self.study not in _STUDIES:
            raise ConfigError(f"unknown study '{self.study}'; known: {', '.join(_STUDIES)}")


@dataclass(frozen=True)
class RecordingOptions(Options):
    """How to read new recordings."""

    resample: bool = option(False, help="EDF: bring another rate to the model's.")


class SleepEdf(Source[SleepEdfOptions, RecordingOptions]):
    """PSG and Hypnogram pairs to 30 s epochs with a sleep stage each.

    The column ``signal`` is ``(rows, 2, 3000)`` float32 in microvolts (Fpz-Cz, Pz-Oz); the target is one of five stages
    (N3 is stages 3 and 4); a person's nights are one patient. Only the two channels are read.
    """

    name = "sleep-edf"
    options_class = SleepEdfOptions
    prediction_options_class = RecordingOptions
    published = PublishedCounts(
        "Sleep-EDF Expanded 1.0.0, Cassette: 153 nights",
        {"patients": 78, "samples": 415_089},
        {"W": 0.688, "N1": 0.052, "N2": 0.166, "N3": 0.032, "REM": 0.062},
        notes={
            "samples": "the published features of the same 153 nights hold 414,961 scored epochs, 128 fewer than the "
            "paper prints"
        },
    )
    docs = SourceDocs(
        predicts="sleep stages from two EEG channels",
        target="five classes",
        page="[sleep-edf](datasets/sleep-edf.md)",
        task="sleep staging",
        files="[Sleep-EDF](docs/datasets/sleep-edf.md): PSG and hypnogram EDF pairs",
    )

    def looks_like(self, folder: Path) -> bool:
        return any(_NAME.fullmatch(path.name) for path in folder.iterdir())

    def prepare(
        self, raw: Path, out: Path, options: SleepEdfOptions, *, workers: int = 1, overwrite: bool = False
    ) -> Path:
        """Make a dataset folder; the files are ``SC4ssNE0-PSG.edf`` and ``SC4ssNEC-Hypnogram.edf`` at any depth."""
        raw = raw.absolute()
        make_ready(out, overwrite=overwrite)
        folder = find_nights(raw, options.study)
        _check_folder(raw, folder, options)
        nights = limit(folder.nights, options.limit_patients)
        with work_folder(out, self.name, {"wake_margin": options.wake_margin}) as work:
            self._write(raw, out, folder, nights, options, workers, overwrite, work)
        return out

    def _write(
        self,
        raw: Path,
        out: Path,
        folder: RawFolder,
        nights: Sequence[Night],
        options: SleepEdfOptions,
        workers: int,
        overwrite: bool,
        work: WorkFolder,
    ) -> None:
        jobs = [Job(night.name, (night.psg, night.hypnogram), (night, options.wake_margin)) for night in nights]
        plans = run_jobs(plan_night, jobs, work, NightPlan, workers=workers, title="checking nights")
        sums = [Job(f"checksums of {night.name}", (night.psg, night.hypnogram), night) for night in nights]
        if not in_this_process(workers):
            run_jobs(describe_night, sums, work, NightFiles, workers=workers, title="checksums")
        info = DatasetInfo(settings=SETTINGS)
        with DatasetWriter(out, TargetSpec("classes", STAGES), info, overwrite=overwrite) as writer:
            files = _copy(writer, sums, plans, work)
            flow = _flow(folder, nights, plans, options.wake_margin)
            writer.info = with_provenance(writer.info, self.name, files, options.to_json(), flow, raw=raw)

    def for_prediction(self, raw: Path, trained: TrainedOn, options: RecordingOptions) -> Iterator[Recording]:
        """One recording after the other, cut into the epochs the model knows; hypnograms are not needed."""
        self.check_trained_on(trained)
        for path in find_recordings(raw):
            yield read_recording(path, SignalFormat.of(trained.settings), resample=options.resample)

    def write_predictions(self, folder: Path, samples: NewSamples, predictions: SamplePredictions) -> list[Path]:
        """Write stages as ``NAME.csv``, as EDF+ annotations ``NAME-Hypnogram.edf`` and as a plot ``NAME.png``."""
        assert isinstance(samples, Recording)
        names, probabilities = predictions.target.names, predictions.probabilities
        if probabilities.shape != (len(samples.patients), len(names)):
            raise DataError(
                f"{len(samples.patients)} epochs and {len(names)} stages, but probabilities of {probabilities.shape}"
            )
        table, notes, plot = (folder / f"{samples.name}{end}" for end in (".csv", "-Hypnogram.edf", ".png"))
        stages = [_NO_STAGE if name is None else _WORDS.get(name, name) for name in predictions.decisions]
        write_atomically(table, epoch_table(names, probabilities, samples.epoch_seconds, predictions.trust))
        try:
            write_annotations(notes, stages, samples.start, samples.epoch_seconds)
            plot_hypnogram(plot, names, probabilities, samples.name, samples.epoch_seconds)
        except OSError as error:
            raise disk_error(error, folder) from error
        return [table, notes, plot]


# Which files belong together, and which epochs of a night are samples


@dataclass(frozen=True)
class Night:
    """A recording and its hypnogram; ``patient`` is the same for both nights of a person."""

    name: str
    patient: str
    number: int
    psg: Path
    hypnogram: Path


@dataclass(frozen=True)
class RawFolder:
    """What a folder of raw files holds."""

    nights: tuple[Night, ...]
    unpaired: tuple[Path, ...]


def find_nights(raw: Path, study: str) -> RawFolder:
    """Pair the PSG and Hypnogram files of a folder and its subfolders, sorted by person and night."""
    parts: dict[str, dict[str, Path]] = {}
    for path in sorted(raw.rglob("*")) if raw.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match is None or match["study"].upper() not in _STUDIES[study]:
            continue
        name = (match["study"] + match["subject"] + match["night"]).upper()
        files = parts.setdefault(name, {})
        part = match["part"].lower()
        if part in files:
            raise DataError(
                f"two {match['part']} files for one night in {raw}: "
                f"{files[part].relative_to(raw)} and {path.relative_to(raw)}. Keep one of them"
            )
        files[part] = path
    nights = [
        Night(name, name[:5], int(name[5]), files["psg"], files["hypnogram"])
        for name, files in sorted(parts.items())
        if len(files) == 2
    ]
    unpaired = [path for files in parts.values() if len(files) == 1 for path in files.values()]
    return RawFolder(tuple(nights), tuple(sorted(unpaired)))


def stages_from_annotations(annotations: Iterable[Annotation], path: Path) -> npt.NDArray[np.int8]:
    """The stage of each 30 s epoch of a hypnogram, from the recording's start to the end of the last annotation.

    An epoch gets a stage if one annotation covers all of it; others are unscored.

    Returns
    -------
    array ``(epochs,)`` int8
        Codes into ``STAGES``, or ``UNSCORED``, or ``MOVEMENT``.
    """
    known = [(note, _CODES[note.text.lower()]) for note in annotations if note.text.lower() in _CODES]
    if not known:
        raise DataError(f"{path} names no sleep stages: it is not a hypnogram of this dataset")
    spans = [(_ceil(note.onset), _floor(note.onset + note.duration), code) for note, code in known]
    end = max(stop for _, stop, _ in spans)
    if end > 100_000 or min(start for start, _, _ in spans) < 0:
        raise DataError(f"{path} is damaged: it scores epochs {min(s for s, _, _ in spans)} to {end} of a night")
    stages = np.full(max(end, 0), UNSCORED, np.int8)
    scored = np.zeros(max(end, 0), bool)
    for start, stop, code in spans:
        if start < stop and bool((scored[start:stop] & (stages[start:stop] != code)).any()):
            raise DataError(f"{path} gives two stages to one epoch, near {start * EPOCH_SECONDS} s: it is damaged")
        stages[start:stop] = code
        scored[start:stop] = True
    return stages


def _ceil(seconds: float) -> int:
    return math.ceil(seconds / EPOCH_SECONDS - 1e-6)


def _floor(seconds: float) -> int:
    return math.floor(seconds / EPOCH_SECONDS + 1e-6)


def check_recording(psg: Path) -> EdfHeader:
    """The header of a PSG that has the channels, rate and units of Sleep-EDF, or an error that says what it lacks."""
    header = read_header(psg)
    channels = [header.find(label) for label in CHANNELS]
    require_rate(header, channels, RATE)
    for channel in channels:
        microvolts_per_unit(header, channel)
    return header


@dataclass(frozen=True)
class NightPlan:
    """Which epochs of a night are samples.

    Parameters
    ----------
    epochs, stages : list of int
        Indices of the samples, and the codes of their stages.
    seconds : float
        Length of the signal.
    counts : dict of str to int
        How many epochs there are, and how many are left out for which reason.
    """

    epochs: list[int]
    stages: list[int]
    seconds: float
    counts: dict[str, int]


def plan_night(argument: tuple[Night, float | None]) -> NightPlan:
    """Check one night and choose its epochs."""
    night, wake_margin = argument
    header = check_recording(night.psg)
    hypnogram = read_header(night.hypnogram)
    if header.start and hypnogram.start and header.start != hypnogram.start:
        raise DataError(
            f"{night.psg.name} starts at {header.start:%d.%m.%Y %H:%M:%S}, its hypnogram {night.hypnogram.name} at "
            f"{hypnogram.start:%d.%m.%Y %H:%M:%S}: they do not belong together"
        )
    scored = stages_from_annotations(read_annotations(night.hypnogram), night.hypnogram)
    in_signal = int((header.seconds + 1e-6) // EPOCH_SECONDS)
    stages = scored[:in_signal]
    if not len(stages):
        raise DataError(f"{night.psg.name} and {night.hypnogram.name} do not overlap by a single epoch of 30 s")
    kept, counts = choose_epochs(stages, wake_margin)
    beyond = scored[in_signal:]
    counts |= {
        "signal_without_hypnogram": in_signal - len(stages),
        "stages_without_signal": int((beyond >= 0).sum()),
    }
    return NightPlan(kept.tolist(), stages[kept].tolist(), header.seconds, counts)


@dataclass(frozen=True)
class NightFiles:
    """Name, size and checksum of a night's two files."""

    psg: SourceFile
    hypnogram: SourceFile


def describe_night(night: Night) -> NightFiles:
    """Read both files of a night for their checksums."""
    return NightFiles(*describe_files([night.psg, night.hypnogram]))


def choose_epochs(
    stages: npt.NDArray[np.int8], wake_margin: float | None
) -> tuple[npt.NDArray[np.int64], dict[str, int]]:
    """Indices of the epochs to keep, ``(kept,)``, and how many each filter leaves out."""
    staged = stages >= 0
    within = np.ones(len(stages), bool)
    if wake_margin is not None:
        asleep = np.nonzero(stages > 0)[0]
        margin = int(wake_margin * 60 // EPOCH_SECONDS)
        within[:] = False
        if len(asleep):
            within[max(asleep[0] - margin, 0) : asleep[-1] + margin + 1] = True
    counts = {
        "overlap": len(stages),
        "movement": int((stages == MOVEMENT).sum()),
        "unscored": int((stages == UNSCORED).sum()),
        "outside_margin": int((staged & ~within).sum()),
    }
    return np.nonzero(staged & within)[0], counts


def night_offsets(nights: Sequence[Night], plans: Sequence[NightPlan]) -> list[float]:
    """Seconds to add to each night's clock, in whole days, so that a person's nights follow one another."""
    offsets, clock, person = [], 0.0, ""
    for night, plan in zip(nights, plans, strict=True):
        clock = 0.0 if night.patient != person else clock
        offsets.append(clock)
        clock += 86_400.0 * math.ceil(max(plan.seconds, 1.0) / 86_400.0)
        person = night.patient
    return offsets


def _check_folder(raw: Path, folder: RawFolder, options: SleepEdfOptions) -> None:
    if not folder.nights and not folder.unpaired:
        if options.study != "both" and find_nights(raw, "both").nights:
            raise ConfigError(
                f"{raw} holds no {options.study} recordings, but others of Sleep-EDF: ask for '--study both'"
            )
        raise wrong_folder(raw, "Sleep-EDF files (SC4001E0-PSG.edf, SC4001EC-Hypnogram.edf, ...)")
    if folder.unpaired and options.unpaired == "refuse":
        first = folder.unpaired[0]
        part, other = ("PSG", "Hypnogram") if "psg" in first.name.lower() else ("Hypnogram", "PSG")
        raise DataError(
            f"{first.name} is a {part} without its {other} ({len(folder.unpaired)} such files in {raw}): "
            "download the missing files, or leave these out with '--unpaired skip'"
        )
    if not folder.nights:
        raise DataError(f"{raw} holds not one pair of a PSG and its Hypnogram")


def limit(nights: Sequence[Night], patients: int | None) -> tuple[Night, ...]:
    """The nights of the first so many people."""
    chosen = list(dict.fromkeys(night.patient for night in nights))[:patients]
    return tuple(night for night in nights if night.patient in set(chosen))


def _flow(
    folder: RawFolder, nights: Sequence[Night], plans: Sequence[NightPlan], wake_margin: float | None
) -> CohortFlow:
    def people(nights: Sequence[Night]) -> int:
        return len({night.patient for night in nights})

    def total(reason: str) -> int:
        return sum(plan.counts[reason] for plan in plans)

    flow = CohortFlow()
    pairs, alone = len(folder.nights), len(folder.unpaired)
    flow.add("recordings with a hypnogram", patients=people(folder.nights), recordings=pairs, left_out=alone)
    if len(nights) < pairs:
        flow.add("limit on patients", patients=people(nights), recordings=len(nights), left_out=pairs - len(nights))
    left = total("overlap")
    outside = total("signal_without_hypnogram")
    flow.add("30 s epochs with signal and hypnogram", patients=people(nights), samples=left, left_out=outside)
    steps = {"without movement time": "movement", "with a stage": "unscored"}
    if wake_margin is not None:
        steps[f"within {wake_margin:g} minutes of sleep"] = "outside_margin"
    for step, reason in steps.items():
        left -= total(reason)
        flow.add(step, patients=people(nights), samples=left, left_out=total(reason))
    flow.add("samples", patients=_people_left(nights, plans), samples=left)
    return flow


def _people_left(nights: Sequence[Night], plans: Sequence[NightPlan]) -> int:
    return len({night.patient for night, plan in zip(nights, plans, strict=True) if plan.epochs})


def _copy(
    writer: DatasetWriter, jobs: Sequence[Job[Night]], plans: Sequence[NightPlan], work: WorkFolder
) -> list[SourceFile]:
    """Write the chosen epochs, a night at a time.

    A night whose checksums are not known yet is hashed while its epochs are written, so that it is read once.

    Returns
    -------
    list of SourceFile
    """
    nights = [job.argument for job in jobs]
    files: list[SourceFile] = []
    with Progress("copying signals", total=len(nights)) as progress:
        for job, plan, offset in zip(jobs, plans, night_offsets(nights, plans), strict=True):
            night, known = job.argument, work.load(job, NightFiles)
            if known is None:
                content = map_whole(night.psg)
                digest = hashlib.sha256()
                with hashed_meanwhile(digest, content.data):
                    _copy_night(writer, night, plan, offset, content)
                signal = SourceFile(night.psg.name, len(content), digest.hexdigest())
                known = NightFiles(signal, *describe_files([night.hypnogram]))
                work.save(job, known)
            else:
                _copy_night(writer, night, plan, offset, None)
            files += [known.psg, known.hypnogram]
            progress.advance()
    return files


def _copy_night(
    writer: DatasetWriter,
    night: Night,
    plan: NightPlan,
    offset: float,
    content: npt.NDArray[np.uint8] | None,
) -> None:
    kept, stages = np.asarray(plan.epochs, np.int64), np.asarray(plan.stages, np.int64)
    header = check_recording(night.psg)
    channels = [header.find(label) for label in CHANNELS]
    amplitudes = AmplitudeCheck(header, channels)
    # A few megabytes at a time stay in the processor's cache between reading, hashing and writing.
    for start in range(0, len(kept), _BLOCK):
        part = slice(start, start + _BLOCK)
        signal = read_epochs(header, channels, kept[part], EPOCH_SAMPLES, content)
        amplitudes.add(signal)
        times = kept[part] * float(EPOCH_SECONDS) + offset
        writer.append_immutable({"signal": signal}, stages[part], [night.patient] * len(signal), times)
    amplitudes.warn()


# New recordings, which have no hypnogram


@dataclass(frozen=True)
class Recording(NewSamples):
    """The epochs of a new recording.

    Parameters
    ----------
    start : datetime, optional
        When it began.
    epoch_seconds : float
    """

    start: datetime | None = None
    epoch_seconds: float = EPOCH_SECONDS

    @property
    def name(self) -> str:
        """The file's, without its ending."""
        return str(self.patients[0])

    @property
    def signal(self) -> npt.NDArray[np.float32]:
        """``(epochs, channels, samples)`` in microvolts at the model's rate."""
        return np.asarray(self.columns["signal"])


def find_recordings(raw: str | Path) -> list[Path]:
    """The EDF recordings a path names: itself, or all in a folder; files of annotations only are skipped."""
    path = Path(raw)
    if not path.exists():
        raise StorageError(f"there is no file or folder {path}")
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() == ".edf")
    recordings = [file for file in files if read_header(file).labels]
    if not recordings:
        raise StorageError(f"{path} holds no EDF recordings")
    return recordings


@dataclass(frozen=True)
class SignalFormat:
    """The signals a model was trained on.

    Parameters
    ----------
    channels : tuple of str
    rate : float
        Samples per second.
    epoch_seconds : float
    """

    channels: tuple[str, ...]
    rate: float
    epoch_seconds: float = EPOCH_SECONDS

    @staticmethod
    def of(settings: Mapping[str, Json]) -> SignalFormat:
        """From the settings of a dataset."""
        return TypeAdapter(SignalFormat).validate_python(settings)


def read_recording(path: str | Path, trained: SignalFormat, *, resample: bool = False) -> Recording:
    """Read a recording as a model's inputs.

    Parameters
    ----------
    path : path
        EDF or EDF+, without a hypnogram.
    trained : SignalFormat
        Of the data the model was trained on.
    resample : bool
        Bring another sampling rate to the model's instead of refusing it.

    Raises
    ------
    DataError
        For other channels, units or rates, with what was expected; a recording shorter than an epoch.
    """
    header = read_header(path)
    channels = [_channel(header, label, trained) for label in trained.channels]
    rate, seconds = trained.rate, trained.epoch_seconds
    for channel in channels:
        microvolts_per_unit(header, channel)
    rates = {header.rate(channel) for channel in channels}
    samples = round(rate * seconds)
    if all(abs(given - rate) <= 1e-6 * rate for given in rates):
        epochs = int((header.seconds + 1e-6) // seconds)
        _check_length(header, epochs, seconds)
        signal = read_epochs(header, channels, np.arange(epochs), samples)
        _warn_of_amplitude(header, channels, signal)
    elif resample:
        signal = _resampled(header, channels, rate, seconds, samples)
    else:
        given = ", ".join(f"{value:g}" for value in sorted(rates))
        raise DataError(
            f"{header.path} is sampled at {given} Hz; the model was trained on {rate:g} Hz. "
            "Ask for resampling ('--resample') if that is what you want"
        )
    return _recording(header, signal, seconds)


def _channel(header: EdfHeader, label: str, trained: SignalFormat) -> EdfChannel:
    try:
        return header.find(label)
    except DataError as error:
        raise DataError(f"{error}. The model was trained on {', '.join(trained.channels)}") from error


def _warn_of_amplitude(header: EdfHeader, channels: Sequence[EdfChannel], signal: npt.NDArray[np.float32]) -> None:
    amplitudes = AmplitudeCheck(header, channels)
    amplitudes.add(signal)
    amplitudes.warn()


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
    for row, channel in enumerate(channels):
        records = read_epochs(header, [channel], np.arange(header.records), channel.samples_per_record)
        whole = records.reshape(-1)
        _warn_of_amplitude(header, [channel], whole[None, None])
        ratio = Fraction(rate / header.rate(channel)).limit_denominator(1000)
        changed = resample_poly(whole, ratio.numerator, ratio.denominator)[: epochs * samples]
        changed = np.pad(changed, (0, epochs * samples - len(changed)), mode="edge")
        signal[:, row] = changed.reshape(epochs, samples)
    return signal


def _recording(header: EdfHeader, signal: npt.NDArray[np.float32], seconds: float) -> Recording:
    times = np.arange(len(signal), dtype=np.float64) * seconds
    return Recording(
        columns={"signal": torch.from_numpy(signal)},
        rows=pl.DataFrame({"epoch": np.arange(len(signal)), "seconds": times}),
        patients=np.full(len(signal), header.path.stem),
        times=times,
        origin=header.path,
        start=header.start,
        epoch_seconds=seconds,
    )


# Predictions for people to read


def epoch_table(
    names: Sequence[str],
    probabilities: npt.NDArray[np.floating],
    seconds: float,
    more: Mapping[str, Sequence[Any]] | None = None,
) -> str:
    """CSV text: epoch, its start in seconds, the most probable stage, each stage's probability, and further columns.

    An epoch whose probabilities are not finite has neither a stage nor probabilities.
    """
    further = more or {}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["epoch", "seconds", "stage", *(f"p_{name}" for name in names), *map(csv_text, further)])
    for epoch, (row, best) in enumerate(zip(probabilities, probabilities.argmax(axis=1), strict=True)):
        more_cells = [column[epoch] for column in further.values()]
        known = [names[best], *(f"{value:.6f}" for value in row)] if np.isfinite(row).all() else [""] * (len(row) + 1)
        cells = [epoch, f"{epoch * seconds:g}", *known, *more_cells]
        writer.writerow([csv_text(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()


def plot_hypnogram(
    path: Path,
    names: Sequence[str],
    probabilities: npt.NDArray[np.floating],
    title: str,
    seconds: float,
) -> None:
    """Stages over the hours of the night, and below it how sure the model is."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    order = sorted(range(len(names)), key=lambda k: _HEIGHT.get(names[k], -k))
    level = np.empty(len(names))
    level[order] = np.arange(len(names))
    hours = np.arange(len(probabilities) + 1) * seconds / 3600
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
