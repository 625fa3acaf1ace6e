"""What the synthetic twins of the health-record databases share: the generative model and files written as a stream.

Every patient has a factor z. Codes are drawn from a softmax whose logits are a popularity, plus a part that depends on
the visit's latent state, plus a part that depends on z: the paper's model, with z the patient's domain.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.errors import ConfigError, StorageError
from manydg.files import new_folder
from manydg.sources import Options, option
from manydg.sources._preparing import mark_synthetic

FACTORS = 8
CHUNK = 2000
ENDINGS = (".csv", ".csv.gz")
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PatientsOptions(Options):
    """How many patients, and which."""

    patients: int = option(help="How many patients.")
    seed: int = option(0, help="The same seed writes the same files.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patients < 2:
            raise ConfigError(f"a synthetic database needs at least 2 patients, not {self.patients}")


@dataclass(frozen=True)
class TablesOptions(PatientsOptions):
    """The same, of a database of CSV tables."""

    ending: str = option(".csv.gz", help="How the tables are stored: .csv.gz or .csv.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ending not in ENDINGS:
            raise ConfigError(f"tables end in one of {', '.join(ENDINGS)}, not '{self.ending}'")


class CodeModel:
    """Which codes a visit gets: a popularity, the latent state's part and the patient's part.

    Parameters
    ----------
    rng : numpy Generator
    size : int
        Number of codes.
    states : int
        Width of the latent state.
    patient_strength : float
        How much the patient's factor shifts the logits.
    """

    def __init__(self, rng: np.random.Generator, size: int, states: int, patient_strength: float = 0.5) -> None:
        self.size = size
        self._popularity = -1.1 * np.log(1 + rng.permutation(size))
        self._of_state = rng.normal(size=(states, size))
        self._of_patient = patient_strength * rng.normal(size=(FACTORS, size)) / np.sqrt(FACTORS)

    def draw(
        self, rng: np.random.Generator, state: FloatArray, factor: FloatArray, counts: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Draw so many codes for each visit.

        Parameters
        ----------
        state : array ``(visits, states)``
        factor : array ``(visits, FACTORS)``
        counts : array ``(visits,)``

        Returns
        -------
        visit, code : arrays ``(draws,)``
        """
        logits = self._popularity + state @ self._of_state + factor @ self._of_patient
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        edges = np.cumsum(chances, axis=1)
        edges /= edges[:, -1:]
        # One search over all visits at once: visit i's edges lie between i and i + 1.
        visit = np.repeat(np.arange(len(counts)), counts)
        flat = (edges + np.arange(len(counts))[:, None]).ravel()
        edge = np.searchsorted(flat, visit + rng.random(len(visit)), side="right")
        return visit, np.minimum(edge - visit * self.size, self.size - 1)


class CsvFiles:
    """CSV files that grow by frames, plain or gzipped by their ending."""

    def __init__(self, folder: Path, ending: str, stack: ExitStack) -> None:
        self.folder, self._ending, self._stack = folder, ending, stack
        self._streams: dict[str, IO[bytes]] = {}
        self._columns: dict[str, list[str]] = {}

    def append(self, name: str, frame: pl.DataFrame) -> None:
        """Add rows to a table; its first frame decides the columns."""
        first = name not in self._streams
        if first:
            path = self.folder / f"{name}{self._ending}"
            plain = self._stack.enter_context(path.open("wb"))
            packed = self._ending.endswith(".gz")
            stream: Any = self._stack.enter_context(gzip.GzipFile("", "wb", 1, plain, mtime=0)) if packed else plain
            self._streams[name] = stream
            self._columns[name] = frame.columns
        frame.select(self._columns[name]).write_csv(self._streams[name], include_header=first)

    def blank_line(self, name: str) -> None:
        """Add a line with nothing in it, as exports that were joined by hand have."""
        self._streams[name].write(b"\n")


@contextmanager
def synthetic_folder(out: Path) -> Iterator[Path]:
    """A folder for synthetic data that appears under its name only once it is complete."""
    if out.exists():
        raise StorageError(f"{out} already exists: name another folder for the synthetic data")
    with new_folder(out) as folder:
        mark_synthetic(folder)
        yield folder


@contextmanager
def new_tables(out: Path, ending: str) -> Iterator[CsvFiles]:
    """A new folder of CSV tables."""
    with synthetic_folder(out) as folder, ExitStack() as stack:
        yield CsvFiles(folder, ending, stack)


def each_once(visit: IntArray, code: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """The different codes of each visit, in the order of visits."""
    pairs = np.unique(visit * size + code)
    return pairs // size, pairs % size


def pick(rng: np.random.Generator, values: Sequence[str | None], count: int) -> pl.Series:
    """So many values, each as likely."""
    return pl.Series(list(values))[rng.integers(0, len(values), count)]


def blank_out(rng: np.random.Generator, frame: pl.DataFrame, share: dict[str, float]) -> pl.DataFrame:
    """Make a share of some columns' cells missing."""
    for name, part in share.items():
        gone = pl.Series(rng.random(frame.height) < part)
        frame = frame.with_columns(pl.when(gone).then(None).otherwise(pl.col(name)).alias(name))
    return frame


def repeat_rows(rng: np.random.Generator, frame: pl.DataFrame, share: float) -> pl.DataFrame:
    """Write a share of the rows twice, as exports that were joined badly do."""
    again = np.flatnonzero(rng.random(frame.height) < share)
    return pl.concat([frame, frame[again]]) if len(again) else frame


def words(prefix: str, count: int, rng: np.random.Generator) -> list[str]:
    """Different code names that are as long as real ones."""
    systems = ("cardiovascular", "pulmonary", "renal", "neurologic", "infectious diseases", "gastrointestinal")
    chosen = rng.integers(0, len(systems), count)
    return [f"{systems[at]}|{prefix} group {number // 12}|{prefix} {number}" for number, at in enumerate(chosen)]


def write_truth(folder: Path, ids: list[Any], factors: FloatArray) -> None:
    """The patients' factors, in a file that ``prepare`` does not look at."""
    columns = {f"z{at}": factors[:, at] for at in range(factors.shape[1])}
    pl.DataFrame({"patient": ids, **columns}).write_parquet(folder / "truth.parquet")
