"""All of the paper: every experiment on every dataset at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from manydg.algorithms import algorithm_order, controls, paper_methods
from manydg.data.dataset import open_dataset
from manydg.data.storage import read_description
from manydg.errors import DataError, ManyDGError, StorageError, unknown_name
from manydg.sources import SOURCES, TWINS, find_source, find_twin, recognize
from manydg.studies.conduct import conduct, fitting, make_request, plan_experiment
from manydg.studies.settings import Options, changed, preset_names, read_preset
from manydg.studies.study import Board, Request, Study

# Finding datasets in a folder by what is in it, and making dataset folders of raw files


PREPARED, RAW = "prepared", "raw"
_DEPTH = 3
Report = Callable[[str], None]


@dataclass(frozen=True)
class DataFolder:
    """A dataset in a folder.

    - ``name``: What to call it: the source's name for raw files, the folder's for a dataset folder.
    - ``state`` {"prepared", "raw"}
    """

    name: str
    state: str
    path: Path


def find_datasets(folder: str | Path) -> list[DataFolder]:
    """Every dataset folder, and every folder of raw files that can be prepared without asking, in a folder and below.

    A source that is there both ways is used as it was prepared. Names are different from one another.
    """
    root = Path(folder)
    if not root.is_dir():
        raise StorageError(f"there is no folder {root}: name the folder that holds datasets or raw files")
    folders = list(_walk(root, _DEPTH))
    made_of = {_source(entry.path) for entry in folders if entry.state == PREPARED}
    kept = [entry for entry in folders if entry.state == PREPARED or entry.name not in made_of]
    named: dict[str, DataFolder] = {}
    for entry in sorted(kept, key=lambda entry: (entry.name, str(entry.path))):
        if entry.name in named:
            entry = DataFolder("-".join(entry.path.relative_to(root).parts) or entry.name, entry.state, entry.path)
        named[entry.name] = entry
    return list(named.values())


def _walk(folder: Path, depth: int) -> Iterator[DataFolder]:
    if (folder / "dataset.json").is_file():
        yield DataFolder(folder.resolve().name, PREPARED, folder)
        return
    source = recognize(folder)
    if source is not None and not source.general:
        if source.self_explanatory:
            yield DataFolder(source.name, RAW, folder)
        return
    if depth:
        for child in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from _walk(child, depth - 1)


def _source(folder: Path) -> str | None:
    try:
        return str(read_description(folder).info.source)
    except ManyDGError:
        return None


def prepare_folder(entry: DataFolder, raw: Path, out: Path, *, workers: int, report: Report) -> Path:
    """The dataset folder of an entry: itself, or made from raw files in ``out`` unless it was made before.

    - ``raw``: Where else to look for what the files alone do not tell: a mapping of drugs, for one.
    """
    if entry.state == PREPARED:
        return entry.path
    if (out / "dataset.json").is_file():
        return out
    report(f"preparing {entry.name} from {entry.path}")
    source = recognize(entry.path)
    assert source is not None
    return source.prepare(entry.path, out, source.options_for(entry.path, raw, report), workers=workers)


def synthesize_all(folder: Path, scale: str, report: Report) -> None:
    """Write the twins of a scale, those that are not there yet, each in a folder of its source's name."""
    for name in TWINS.names():
        twin = find_twin(name)
        path = folder / name
        if scale not in twin.scales or (path.exists() and any(path.iterdir())):
            continue
        options = twin.scales[scale]
        report(f"making up {name}: {options.to_json()['patients']} patients")
        path.parent.mkdir(parents=True, exist_ok=True)
        twin.create(path, options)


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


def compared() -> tuple[str, ...]:
    """The algorithms of the main table: the paper's, the controls and a learner of tables."""
    return tuple(sorted((*paper_methods(), *controls(), "boosting"), key=algorithm_order))


@dataclass(frozen=True)
class Scale:
    """How much of everything.

    - ``name``: By which synthetic twins know how much to write.
    - ``seeds``: Patient splits of the main table; ``varied_seeds`` those of the other experiments.
    - ``epochs``, ``timed_epochs``: Training epochs, the settings' own where ``None``; epochs of the running-time
      experiment.
    - ``patients``: Most patients of a dataset, drawn at random.
    - ``rivals``: Algorithms of the experiments that compare some; the paper's if not given.
    - ``training``: Other training options.
    """

    name: str
    seeds: int
    varied_seeds: int
    epochs: int | None = None
    timed_epochs: int = 23
    patients: int | None = None
    rivals: tuple[str, ...] | None = None
    training: Mapping[str, int] = field(default_factory=dict)


SCALES = {
    "full": Scale("full", seeds=5, varied_seeds=5),
    "small": Scale("small", seeds=3, varied_seeds=2, epochs=10, patients=300),
    "smoke": Scale(
        "smoke",
        seeds=2,
        varied_seeds=1,
        epochs=1,
        timed_epochs=4,
        patients=160,
        rivals=("base", "dann", "manydg"),
        training={"batch_size": 64},
    ),
}


@dataclass(frozen=True)
class Chapter:
    """A dataset ready for its experiments."""

    name: str
    dataset: Path
    requests: Mapping[str, Request]

    def study(self, folder: Path, device: str) -> Study:
        """All runs of the dataset as one study, for a plan."""
        runs = [run for name, request in self.requests.items() for run in plan_experiment(name, request)]
        return Study(folder, self.dataset, runs, self.name, device)


def scale_named(name: str) -> Scale:
    """A scale by its name."""
    if name not in SCALES:
        raise unknown_name("scale", name, SCALES)
    return SCALES[name]


def gather(raw: Path, synthetic: bool, out: Path, scale: Scale, report: Report) -> list[DataFolder]:
    """The datasets to work on; twins are written first where they are asked for."""
    if synthetic:
        folder = out / "synthetic"
        synthesize_all(folder, scale.name, report)
        return find_datasets(folder)
    entries = find_datasets(raw)
    if not entries:
        known = ", ".join(name for name in SOURCES.names() if find_source(name).self_explanatory)
        raise DataError(
            f"{raw} holds neither dataset folders nor raw files of {known}; '--synthetic' works on made-up data"
        )
    return entries


def ready(
    entries: Sequence[DataFolder], raw: Path, out: Path, scale: Scale, workers: int, report: Report
) -> list[Chapter]:
    """Prepare what is raw and plan each dataset; one that cannot be prepared is named and left out."""
    chapters = []
    for entry in entries:
        try:
            whole = prepare_folder(entry, raw, out / "datasets" / entry.name, workers=workers, report=report)
            dataset = some_patients(whole, out / "datasets" / f"{entry.name}-some", scale.patients, report)
            requests = requests_for(dataset, scale, lambda line, name=entry.name: report(f"{name}, {line}"))  # type: ignore[misc]
            chapters.append(Chapter(entry.name, dataset, requests))
        except ManyDGError as error:
            report(f"{entry.name} is left out: {error}")
    if not chapters:
        raise DataError("not one of the datasets could be used; the lines above say why")
    return chapters


def some_patients(folder: Path, smaller: Path, most: int | None, report: Report) -> Path:
    """The dataset folder, or one with a random part of its patients if it has more than it may."""
    data = open_dataset(folder, verify="sizes")
    if most is None or data.n_patients <= most:
        return folder
    report(f"{folder.name}: {most} of its {data.n_patients} patients, drawn at random")
    if not (smaller / "dataset.json").is_file():
        chosen = np.random.default_rng(0).permutation(np.sort(data.patients))[:most]
        data.subset(sorted(chosen.tolist())).save(smaller)
    return smaller


def requests_for(dataset: Path, scale: Scale, report: Report) -> dict[str, Request]:
    """What to ask of each experiment on a dataset, with the algorithms that fit it."""
    options = options_for(dataset, scale)
    main = fitting(make_request("compare", dataset, options, scale.seeds, compared()), report)
    rivals = tuple(name for name in scale.rivals or paper_methods() if name in main.algorithms)
    varied = replace(main, seeds=scale.varied_seeds, algorithms=rivals, timed_epochs=scale.timed_epochs)
    timed = replace(varied, algorithms=tuple(name for name in paper_methods() if name in main.algorithms))
    special = {"compare": main, "runtime": timed}
    return {name: special.get(name, varied) for name in EXPERIMENTS}


def options_for(dataset: Path, scale: Scale) -> Options:
    """The paper's settings where they are known, else the program's own, with the scale's."""
    source = open_dataset(dataset, verify="sizes").info.source
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
    report: Report = print,
) -> Path:
    """Run every experiment on every dataset.

    - returns: The results folder, for the report.
    """
    results = out / "results"
    for chapter in chapters:
        report(f"{chapter.name}: {', '.join(chapter.requests)}")
        conduct(
            chapter.requests,
            chapter.dataset,
            results,
            title=chapter.name,
            workers=workers,
            device=device,
            board=board() if board else None,
            command=command,
            report=lambda line, name=chapter.name: report(f"{name}, {line}"),  # type: ignore[misc]
        )
    return results


def unprepared(entries: Sequence[DataFolder], out: Path) -> list[DataFolder]:
    """Those that are still raw files."""
    return [
        entry for entry in entries
        if entry.state == RAW and not (out / "datasets" / entry.name / "dataset.json").is_file()
    ]  # fmt: skip
