"""All of the paper: every experiment on every dataset at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from manydg.data.storage import open_dataset
from manydg.errors import DataError, ManyDGError, unknown_name
from manydg.experiments._experiment import Request
from manydg.experiments.conduct import conduct_together, fitting, make_request, plan_experiment
from manydg.experiments.options import Options
from manydg.experiments.raw_data import RAW, Found, Say, find_datasets, prepare_found, synthesize_all
from manydg.experiments.settings_file import changed, preset_names, read_preset
from manydg.experiments.study import Board, Study

EXPERIMENTS = (
    "compare",
    "objectives",
    "weights",
    "limited-data",
    "continual",
    "decomposition",
    "orthogonality",
    "domain-similarity",
    "norms",
    "runtime",
)
COMPARED = (
    "base",
    "prototype",
    "manydg-random-pairs",
    "condadv",
    "dann",
    "irm",
    "sagnet",
    "pcl",
    "mldg",
    "boosting",
    "manydg",
)
RIVALS = ("base", "condadv", "dann", "irm", "sagnet", "pcl", "mldg", "manydg")


@dataclass(frozen=True)
class Scale:
    """How much of everything.

    Parameters
    ----------
    seeds : int
        Patient splits of the main table; ``varied_seeds`` those of the other experiments.
    epochs, timed_epochs : int
        Training epochs, the settings' own where ``None``; epochs of the running-time experiment.
    patients : int or None
        Most patients of a dataset, drawn at random.
    rivals : tuple of str
        Algorithms of the experiments that compare some.
    twins : dict
        Patients of the synthetic twins.
    hours, samples
        Length of a twin's night, and samples of a twin's patient in IIIC.
    training : dict
        Other training options.
    """

    seeds: int
    varied_seeds: int
    epochs: int | None = None
    timed_epochs: int = 23
    patients: int | None = None
    rivals: tuple[str, ...] = RIVALS
    twins: Mapping[str, int] = field(
        default_factory=lambda: {"iiic": 500, "sleep-edf": 78, "mimic3": 6000, "eicu": 3000}
    )
    hours: float = 20.0
    samples: int = 61
    training: Mapping[str, int] = field(default_factory=dict)


SCALES = {
    "full": Scale(seeds=5, varied_seeds=5),
    "small": Scale(
        seeds=3,
        varied_seeds=2,
        epochs=10,
        patients=300,
        twins={"iiic": 150, "sleep-edf": 40, "mimic3": 1500, "eicu": 400},
        hours=4.0,
        samples=20,
    ),
    "smoke": Scale(
        seeds=2,
        varied_seeds=1,
        epochs=1,
        timed_epochs=4,
        patients=160,
        rivals=("base", "dann", "manydg"),
        twins={"iiic": 30, "sleep-edf": 20, "mimic3": 200, "eicu": 160},
        hours=0.25,
        samples=6,
        training={"batch_size": 64},
    ),
}


@dataclass(frozen=True)
class Chapter:
    """A dataset ready for its experiments."""

    name: str
    place: Path
    requests: Mapping[str, Request]

    def study(self, folder: Path, device: str) -> Study:
        """All runs of the dataset as one study, for a plan."""
        runs = [run for name, request in self.requests.items() for run in plan_experiment(name, request)]
        return Study(folder, self.place, runs, self.name, device)


def scale_named(name: str) -> Scale:
    """A scale by its name."""
    if name not in SCALES:
        raise unknown_name("scale", name, SCALES)
    return SCALES[name]


def gather(raw: Path, synthetic: bool, out: Path, scale: Scale, say: Say) -> list[Found]:
    """The datasets to work on; twins are written first where they are asked for."""
    if synthetic:
        place = out / "synthetic"
        synthesize_all(place, dict(scale.twins), hours=scale.hours, samples=scale.samples, say=say)
        return find_datasets(place)
    found = find_datasets(raw)
    if not found:
        raise DataError(
            f"{raw} holds neither dataset folders nor raw files of sleep-edf, iiic, mimic3 or eicu; "
            "'--synthetic' works on made-up data"
        )
    return found


def ready(found: Sequence[Found], raw: Path, out: Path, scale: Scale, workers: int, say: Say) -> list[Chapter]:
    """Prepare what is raw and plan each dataset; one that cannot be prepared is named and left out."""
    chapters = []
    for entry in found:
        try:
            whole = prepare_found(entry, raw, out / "datasets" / entry.name, workers=workers, say=say)
            place = some_patients(whole, out / "datasets" / f"{entry.name}-some", scale.patients, say)
            chapters.append(Chapter(entry.name, place, requests_for(place, scale, say)))
        except ManyDGError as error:
            say(f"{entry.name} is left out: {error}")
    if not chapters:
        raise DataError("not one of the datasets could be used; the lines above say why")
    return chapters


def some_patients(place: Path, smaller: Path, most: int | None, say: Say) -> Path:
    """The dataset folder, or one with a random part of its patients if it has more than it may."""
    data = open_dataset(place, verify="sizes")
    if most is None or data.n_patients <= most:
        return place
    say(f"{place.name}: {most} of its {data.n_patients} patients, drawn at random")
    if not (smaller / "dataset.json").is_file():
        chosen = np.random.default_rng(0).permutation(np.sort(data.patients))[:most]
        data.subset(sorted(chosen.tolist())).save(smaller)
    return smaller


def requests_for(place: Path, scale: Scale, say: Say) -> dict[str, Request]:
    """What to ask of each experiment on a dataset, with the algorithms that fit it."""
    options = options_for(place, scale)
    compared = fitting(make_request("compare", place, options, scale.seeds, COMPARED), say)
    rivals = tuple(name for name in scale.rivals if name in compared.algorithms)
    varied = replace(compared, seeds=scale.varied_seeds, algorithms=rivals, timed_epochs=scale.timed_epochs)
    timed = replace(varied, algorithms=tuple(name for name in RIVALS if name in compared.algorithms))
    special = {"compare": compared, "runtime": timed}
    return {name: special.get(name, varied) for name in EXPERIMENTS}


def options_for(place: Path, scale: Scale) -> Options:
    """The paper's settings where they are known, else the program's own, with the scale's."""
    source = (open_dataset(place, verify="sizes").info.get("provenance") or {}).get("source")
    base = read_preset(str(source)) if source in preset_names() else Options()
    training = dict(scale.training) | ({} if scale.epochs is None else {"epochs": scale.epochs})
    return changed(base, training=training, backbone=None, sets={})


def run_paper(
    chapters: Sequence[Chapter],
    out: Path,
    *,
    workers: int = 1,
    device: str = "auto",
    board: Callable[[], Board] | None = None,
    command: str = "",
    say: Say = print,
) -> Path:
    """Run every experiment on every dataset.

    Returns
    -------
    Path
        The results folder, for the report.
    """
    results = out / "results"
    for chapter in chapters:
        say(f"{chapter.name}: {', '.join(chapter.requests)}")
        conduct_together(
            chapter.requests,
            chapter.place,
            results,
            title=chapter.name,
            workers=workers,
            device=device,
            board=board() if board else None,
            commands=dict.fromkeys(chapter.requests, command),
            say=lambda line, name=chapter.name: say(f"{name}, {line}"),  # type: ignore[misc]
        )
    return results


def unprepared(found: Sequence[Found], out: Path) -> list[Found]:
    """Those that are still raw files."""
    return [
        entry for entry in found
        if entry.state == RAW and not (out / "datasets" / entry.name / "dataset.json").is_file()
    ]  # fmt: skip
