"""All of the paper: every experiment on every dataset at hand."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from manydg.data.dataset import open_dataset
from manydg.data.storage import read_description
from manydg.errors import ConfigError, DataError, ManyDGError, StorageError, unknown_name
from manydg.studies.conduct import conduct, fitting, make_request, plan_experiment
from manydg.studies.experiment import Request
from manydg.studies.settings import Options, changed, preset_names, read_preset
from manydg.studies.study import Board, Study

# Finding the paper's datasets in a folder by what is in it, and making dataset folders of them.


PREPARED, RAW = "prepared", "raw"
SOURCES = ("iiic", "sleep-edf", "mimic3", "eicu")
_DEPTH = 3
_TABLES = {
    "mimic3": {"admissions", "diagnoses_icd", "procedures_icd", "prescriptions"},
    "eicu": {"patient", "diagnosis", "medication"},
}
_EICU_EVENTS = ("diagnosis", "lab", "medication", "physicalexam", "treatment")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A dataset in a folder.

    Parameters
    ----------
    name : str
        What to call it: the source's name for raw files, the folder's for a dataset folder.
    state : {"prepared", "raw"}
    place : Path
    """

    name: str
    state: str
    place: Path


def find_datasets(folder: str | Path) -> list[Found]:
    """Every dataset folder and every set of raw files of a known source in a folder and below.

    A source that is there both ways is used as it was prepared. Names are different from one another.
    """
    root = Path(folder)
    if not root.is_dir():
        raise StorageError(f"there is no folder {root}: name the folder that holds datasets or raw files")
    found = list(_walk(root, _DEPTH))
    made_of = {_source(entry.place) for entry in found if entry.state == PREPARED}
    kept = [entry for entry in found if entry.state == PREPARED or entry.name not in made_of]
    named: dict[str, Found] = {}
    for entry in sorted(kept, key=lambda entry: (entry.name, str(entry.place))):
        if entry.name in named:
            entry = Found("-".join(entry.place.relative_to(root).parts) or entry.name, entry.state, entry.place)
        named[entry.name] = entry
    return list(named.values())


def _walk(folder: Path, depth: int) -> Iterator[Found]:
    if (folder / "dataset.json").is_file():
        yield Found(folder.resolve().name, PREPARED, folder)
        return
    source = source_of(folder)
    if source is not None:
        yield Found(source, RAW, folder)
        return
    if depth:
        for child in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from _walk(child, depth - 1)


def source_of(folder: Path) -> str | None:
    """Which source a folder's files are of; ``None`` where they are of none, or lie further down."""
    names = {path.name.lower() for path in folder.iterdir() if path.is_file()}
    tables = {name.removesuffix(".gz").removesuffix(".csv") for name in names if ".csv" in name}
    for source, needed in _TABLES.items():
        if needed <= tables:
            return source
    if any(name.endswith("-psg.edf") for name in names):
        return "sleep-edf"
    # The patients' own folders of IIIC lie side by side; a single folder of arrays is found by itself.
    patients = [path for path in folder.iterdir() if path.is_dir() and _has_signals(path)]
    return "iiic" if _has_signals(folder) or len(patients) > 1 else None


def _has_signals(folder: Path) -> bool:
    names = [path.name.lower() for path in folder.iterdir() if path.is_file()]
    votes = any(name.endswith(("votes.npy", "votes.csv")) for name in names)
    return votes and any(name.endswith("signals.npy") for name in names)


def _source(place: Path) -> str | None:
    try:
        return str(read_description(place).info.source)
    except ManyDGError:
        return None


def prepare_found(found: Found, raw: Path, out: Path, *, workers: int, say: Say) -> Path:
    """The dataset folder of what was found: itself, or made from raw files in ``out`` unless it was made before.

    Parameters
    ----------
    raw : Path
        Where else to look for what the files alone do not say: a mapping of drugs, for one.
    """
    if found.state == PREPARED:
        return found.place
    if (out / "dataset.json").is_file():
        return out
    say(f"preparing {found.name} from {found.place}")
    source = source_of(found.place)
    if source == "sleep-edf":
        from manydg.sources import sleep_edf

        return sleep_edf.prepare(found.place, out, workers=workers)
    if source == "iiic":
        from manydg.sources import iiic

        return iiic.prepare(found.place, out, workers=workers)
    if source == "mimic3":
        from manydg.sources import mimic3

        return mimic3.prepare(found.place, out, ndc_map=find_drug_mapping(found.place, raw), workers=workers)
    return _prepare_eicu(found.place, out, workers, say)


def _prepare_eicu(place: Path, out: Path, workers: int, say: Say) -> Path:
    from manydg.sources import eicu

    tables = {path.name.lower().removesuffix(".gz").removesuffix(".csv") for path in place.iterdir()}
    absent = [name for name in _EICU_EVENTS if name not in tables]
    if absent:
        say(f"eicu: done without the tables {', '.join(absent)}, which are not in {place}")
    return eicu.prepare(place, out, workers=workers, without=absent)


def find_drug_mapping(*folders: Path) -> Path:
    """A CSV table with the columns ndc and atc, in or under the folders."""
    for folder in folders:
        for path in sorted(folder.rglob("*.csv*")):
            columns = {name.strip().strip('"').lower() for name in _first_line(path).split(",")}
            if {"ndc", "atc"} <= columns:
                return path
    raise DataError(
        f"mimic3 needs a mapping of drugs: put a CSV table with the columns ndc and atc into {folders[-1]} "
        "(docs/datasets.md says where to get one)"
    )


def _first_line(path: Path) -> str:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as packed:
                return packed.readline(10_000)
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline(10_000)
    except (OSError, EOFError):
        return ""


def synthesize_all(folder: Path, patients: dict[str, int], *, hours: float, samples: int, say: Say) -> None:
    """Write twins of the sources, those that are not there yet, each in a folder of its name.

    Parameters
    ----------
    patients : dict of str to int
        People by source.
    hours : float
        Length of a night of Sleep-EDF.
    samples : int
        Samples of a patient of IIIC, on average.
    """
    from manydg.sources import eicu, iiic, mimic3, sleep_edf

    makers: dict[str, Callable[[Path, int], object]] = {
        "iiic": lambda place, count: iiic.synthesize(place, patients=count, samples_per_patient=samples),
        "sleep-edf": lambda place, count: sleep_edf.synthesize(place, patients=count, hours=hours, nights=1),
        "mimic3": lambda place, count: mimic3.synthesize(place, patients=count),
        "eicu": lambda place, count: eicu.synthesize(place, patients=count),
    }
    for source, count in patients.items():
        if source not in makers:
            raise ConfigError(f"there is no twin of {source}")
        place = folder / source
        if place.exists() and any(place.iterdir()):
            continue
        say(f"making up {source}: {count} patients")
        place.parent.mkdir(parents=True, exist_ok=True)
        makers[source](place, count)


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
    source = open_dataset(place, verify="sizes").info.source
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
        conduct(
            chapter.requests,
            chapter.place,
            results,
            title=chapter.name,
            workers=workers,
            device=device,
            board=board() if board else None,
            command=command,
            report=lambda line, name=chapter.name: say(f"{name}, {line}"),  # type: ignore[misc]
        )
    return results


def unprepared(found: Sequence[Found], out: Path) -> list[Found]:
    """Those that are still raw files."""
    return [
        entry for entry in found
        if entry.state == RAW and not (out / "datasets" / entry.name / "dataset.json").is_file()
    ]  # fmt: skip
