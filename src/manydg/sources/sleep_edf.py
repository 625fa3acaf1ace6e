"""Sleep-EDF: nights of EEG to 30 s epochs of five stages.

Sleep-EDF Expanded (PhysioNet ``sleep-edfx`` 1.0.0): polysomnograms of two nights a person as EDF files, each with a
hypnogram as EDF+ annotations. Open Data Commons Attribution License 1.0. Kemp, Zwinderman, Tuk, Kamphuisen and Oberyé,
"Analysis of a sleep-dependent neuronal feedback loop", IEEE Transactions on Biomedical Engineering 47(9), 2000;
Goldberger et al., "PhysioBank, PhysioToolkit, and PhysioNet", Circulation 101(23), 2000.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data.info import DatasetInfo
from manydg.errors import ConfigError, DataError
from manydg.files import Json, csv_text, write_atomically
from manydg.jobs import Job
from manydg.sources import (
    NewSamples,
    Options,
    PublishedCounts,
    SamplePredictions,
    Source,
    SourceDocs,
    TrainedOn,
    option,
)
from manydg.sources._edf import SignalFormat, read_header
from manydg.sources._preparing import make_ready, run_jobs, with_provenance, work_folder, wrong_folder
from manydg.sources._scorings import LabelMap, ScoringFormat
from manydg.sources.edf import (
    KEPT,
    FlowWords,
    Plans,
    RawRecording,
    Recipe,
    RecordingOptions,
    Survey,
    apart,
    by_name,
    cohort_flow,
    format_of,
    limit,
    plan_recording,
    read_new,
    survey,
    together,
    write_dataset,
    write_for_people,
)

CHANNELS = ("EEG Fpz-Cz", "EEG Pz-Oz")
RATE = 100.0
EPOCH_SECONDS = 30
STAGES = ("W", "N1", "N2", "N3", "REM")
SETTINGS: dict[str, Json] = {"rate": RATE, "channels": list(CHANNELS), "unit": "uV", "epoch_seconds": EPOCH_SECONDS}
WORDS = FlowWords("recordings with a hypnogram", "{window} s epochs with signal and hypnogram", "with a stage")

_NAME = re.compile(r"(?P<study>SC4|ST7)(?P<subject>\d\d)(?P<night>\d)\w\w-(?P<part>PSG|Hypnogram)\.edf", re.IGNORECASE)
_STUDIES = {"cassette": ("SC4",), "telemetry": ("ST7",), "both": ("SC4", "ST7")}


@dataclass(frozen=True)
class SleepEdfOptions(Options):
    """Which recordings and epochs to use."""

    limit_patients: int | None = option(None, help="Only the first N patients.", low=1, shown_default="all")
    wake_margin: float | None = option(
        None, help="Wakefulness to keep on either side of sleep.", metavar="MINUTES", shown_default="all"
    )
    study: str = option("cassette", help="cassette, telemetry or both.", choices=tuple(_STUDIES))
    unpaired: str = option(
        "refuse", help="refuse or skip a PSG without hypnogram, or the reverse.", choices=("refuse", "skip")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wake_margin is not None and not 0 <= self.wake_margin < 10_000:
            raise ConfigError(f"the wake margin is a number of minutes, 0 or more; not {self.wake_margin:g}")


class SleepEdf(Source[SleepEdfOptions, RecordingOptions]):
    """PSG and Hypnogram pairs to 30 s epochs with a sleep stage each.

    The column ``signal`` is ``(rows, 2, 3000)`` float32 in microvolts (Fpz-Cz, Pz-Oz); the target is one of five stages
    (N3 is stages 3 and 4); a person's nights are one patient. Only the two channels are read. It is a preset of
    :class:`manydg.sources.edf.Edf` that knows the files' names.
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
        with work_folder(out, self.name, {}) as work:
            jobs = [Job(night.name, night.files, (night, ScoringFormat(), False)) for night in nights]
            surveys = run_jobs(survey, jobs, work, Survey, workers=workers, title="checking nights")
            plans = _plan(nights, surveys, options.wake_margin)
            flow = cohort_flow(plans, WORDS, folder.nights, left_out=len(folder.unpaired))
            offsets = night_offsets([(night.recording.patient, night.seconds) for night in plans.recordings])
            write_dataset(
                out, plans, offsets, DatasetInfo(settings=SETTINGS), work,
                workers=workers, overwrite=overwrite,
                finish=lambda info, files: with_provenance(info, self.name, files, options.to_json(), flow, raw=raw),
            )  # fmt: skip
        return out

    def for_prediction(self, raw: Path, trained: TrainedOn, options: RecordingOptions) -> Iterator[NewSamples]:
        """One person after the other, their nights cut into the epochs the model knows; hypnograms are not needed."""
        self.check_trained_on(trained)
        people: dict[str, list[RawRecording]] = {}
        for name, path in by_name(raw).items():
            match = _NAME.fullmatch(path.name)
            patient, session = (match["study"].upper() + match["subject"], match["night"]) if match else ("", "")
            # Where the name does not say whose it is, it is a person's.
            people.setdefault(patient or str(path), []).append(RawRecording(name, patient, session, path))
        for nights in people.values():
            nights.sort(key=lambda night: night.session)
            recordings = [read_new(night, format_of(trained.settings, options), options) for night in nights]
            yield together(recordings, night_offsets([("", night.seconds) for night in recordings]))

    def write_predictions(self, folder: Path, samples: NewSamples, predictions: SamplePredictions) -> list[Path]:
        """Write stages as ``NAME.csv``, as EDF+ annotations ``NAME-Hypnogram.edf`` and as a plot ``NAME.png``."""
        names, shape = predictions.target.names, predictions.probabilities.shape
        if shape != (len(samples.patients), len(names)):
            raise DataError(f"{len(samples.patients)} epochs and {len(names)} stages, but probabilities of {shape}")
        written: list[Path] = []
        for night, own in apart(samples, predictions):
            kept = night.rows.select(name for name in night.rows.columns if name in KEPT).to_dict(as_series=False)
            text = epoch_table(names, own.probabilities, night.epoch_seconds, {**kept, **own.trust})
            table = folder / f"{night.name}.csv"
            write_atomically(table, text)
            written += [table, *write_for_people(folder, night, own)]
        return written


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


# Which files belong together


@dataclass(frozen=True)
class RawFolder:
    """What a folder of raw files holds; ``patient`` of a night is the same for all nights of a person."""

    nights: tuple[RawRecording, ...]
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
        RawRecording(name, name[:5], name[5], files["psg"], (files["hypnogram"],))
        for name, files in sorted(parts.items())
        if len(files) == 2
    ]
    unpaired = [path for files in parts.values() if len(files) == 1 for path in files.values()]
    return RawFolder(tuple(nights), tuple(sorted(unpaired)))


def _plan(nights: Sequence[RawRecording], surveys: Sequence[Survey], wake_margin: float | None) -> Plans:
    recipe = Recipe(SignalFormat.of(SETTINGS), LabelMap(preset="aasm"), STAGES, wake_margin=wake_margin)
    pairs = zip(nights, surveys, strict=True)
    return Plans(
        recipe, tuple(plan_recording(night, read_header(night.path), result.notes, recipe) for night, result in pairs)
    )


def night_offsets(nights: Sequence[tuple[str, float]]) -> list[float]:
    """Seconds to add to each night's clock, in whole days, so that a person's nights follow one another.

    - ``nights``: Whose each is, and its length in seconds.
    """
    offsets, clock, before = [], 0.0, ""
    for person, seconds in nights:
        clock = 0.0 if person != before else clock
        offsets.append(clock)
        clock += 86_400.0 * math.ceil(max(seconds, 1.0) / 86_400.0)
        before = person
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
