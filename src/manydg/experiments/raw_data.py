"""Finding the paper's datasets in a folder by what is in it, and making dataset folders of them."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from manydg.data.storage import read_description
from manydg.errors import ConfigError, DataError, ManyDGError, StorageError

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
        return str((read_description(place)["info"].get("provenance") or {}).get("source"))
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
            with gzip.open(path, "rt", errors="replace") as packed:
                return packed.readline(10_000)
        with path.open(errors="replace") as file:
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
