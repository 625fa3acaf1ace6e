"""What synthetic twins share: the paper's two-stage generative model, for codes of visits and for signals.

Every patient has a factor z. Codes are drawn from a softmax whose logits are a popularity, plus a part that depends on
the visit's latent state, plus a part that depends on z: the paper's model, with z the patient's domain.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy import fft

from manydg.errors import ConfigError, StorageError
from manydg.files import Json, new_folder
from manydg.sources import Options, mark_synthetic, option

FACTORS = 8
CHUNK = 2000
MAP_NAME = "ndc_to_atc.csv"
STATES = 10
DRUGS, PRODUCTS = 150, 12
_DIAGNOSES, _PROCEDURES = 2500, 1200
DRUGS_A_VISIT = 80
BACKWARD, _UNMAPPED, NO_NDC = 0.002, 0.10, 0.08
PRESCRIPTION_TEXTS: dict[str, list[str | None]] = {
    "PROD_STRENGTH": ["5mg Tab", "25mcg/0.5mL Vial", "1,000 mL Bag"],
    "DOSE_VAL_RX": ["5", "0.5", "10-20", "1,000"],
    "DOSE_UNIT_RX": ["mg", "mL", "UNIT"],
    "FORM_VAL_DISP": ["1", "0.5", "2"],
    "FORM_UNIT_DISP": ["TAB", "VIAL", None],
    "ROUTE": ["IV", "PO", "IM"],
}
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PatientsOptions(Options):
    """How many patients, and which."""

    patients: int = option(help="Number of patients.")
    seed: int = option(0, help="The same seed writes the same files.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patients < 2:
            raise ConfigError(f"a synthetic database needs at least 2 patients, not {self.patients}")


@dataclass(frozen=True)
class TablesOptions(PatientsOptions):
    """The same, of a database of CSV tables."""

    ending: str = option(".csv.gz", help="How the tables are stored: .csv.gz or .csv.", choices=(".csv", ".csv.gz"))


class CodeModel:
    """Which codes a visit gets: a popularity, the latent state's part and the patient's part.

    - ``size``: Number of codes.
    - ``states``: Width of the latent state.
    - ``patient_strength``: How much the patient's factor shifts the logits.
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

        - ``state`` ``(visits, states)``
        - ``factor`` ``(visits, FACTORS)``
        - ``counts`` ``(visits,)``
        - returns ``visit``, ``code`` ``(draws,)``
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
    """A folder for synthetic data, new or empty, that is filled only once they are complete."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise StorageError(f"{out} is not empty: name another folder")
    with new_folder(out) as folder:
        mark_synthetic(folder)
        yield folder
        if out.exists():
            out.rmdir()


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


# Hospital visits: the codes, the drugs and their mapping


@dataclass(frozen=True)
class World:
    """The parts of the model that all patients share."""

    diagnoses: CodeModel
    procedures: CodeModel
    drugs: CodeModel
    diagnosis_codes: pl.Series
    procedure_codes: pl.Series
    atc: list[str]
    ndc: pl.Series

    @staticmethod
    def make(rng: np.random.Generator) -> World:
        # Products lie far apart, so that no two drugs share a code.
        numbers = range(1, DRUGS * PRODUCTS + 1)
        ndc = [f"{1_000_003 * number + int(rng.integers(1, 1_000_000)):011d}" for number in numbers]
        return World(
            CodeModel(rng, _DIAGNOSES, STATES),
            CodeModel(rng, _PROCEDURES, STATES),
            CodeModel(rng, DRUGS, STATES, patient_strength=1.0),
            pl.Series([f"{100 + number // 3}{number % 3}" for number in range(_DIAGNOSES)]),
            pl.Series([f"{number:04d}" for number in range(_PROCEDURES)]),
            [f"{'ABCDGHJLMNPRSV'[n % 14]}{1 + n // 14:02d}{'ABCDE'[n % 5]}{'ABX'[n % 3]}" for n in range(DRUGS)],
            pl.Series(ndc),
        )


def write_map(folder: Path, rng: np.random.Generator, world: World) -> None:
    atc = pl.Series([code for code in world.atc for _ in range(PRODUCTS)])
    known = pl.Series(rng.random(len(atc)) >= _UNMAPPED)
    pl.DataFrame({"ndc": world.ndc, "atc": atc}).filter(known).write_csv(folder / MAP_NAME)


def stamps(seconds: IntArray) -> pl.Series:
    return pl.Series(seconds * 1_000_000).cast(pl.Datetime("us")).dt.strftime("%Y-%m-%d %H:%M:%S")


# Signals: a label decides a spectrum; a patient bends every spectrum in the same way (tilt, shift of the rhythms, gain
# of each channel, noise floor, a humming device) and has a taste for some labels. The factors are known, so that a
# method's claims about them can be checked.


Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PatientFactors:
    """What is particular to a patient and has nothing to do with the label, and the patient's label preferences."""

    tilt: float
    shift: float
    noise: float
    hum_frequency: float
    hum: float
    gains: tuple[float, ...]
    preferences: tuple[float, ...]

    def to_json(self) -> dict[str, Json]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def draw_factors(
    rng: np.random.Generator, channels: int, labels: int, hum_range: tuple[float, float]
) -> PatientFactors:
    """One patient's factors, from their prior."""
    return PatientFactors(
        tilt=float(rng.normal(0.0, 0.25)),
        shift=float(np.exp(rng.normal(0.0, 0.06))),
        noise=float(np.exp(rng.normal(0.5, 0.5))),
        hum_frequency=float(rng.uniform(*hum_range)),
        hum=float(np.exp(rng.normal(1.5, 0.7))),
        gains=tuple(float(gain) for gain in np.exp(rng.normal(0.0, 0.35, channels))),
        preferences=tuple(float(value) for value in rng.normal(0.0, 0.5, labels)),
    )


def spectra(
    factors: PatientFactors,
    background: npt.NDArray[np.float64],
    rhythms: npt.NDArray[np.float64],
    centres: tuple[tuple[float, float], ...],
    samples: int,
    rate: float,
) -> Array:
    """A patient's amplitude spectrum for each label.

    - ``background`` ``(labels, channels)``: Strength of the falling background.
    - ``rhythms`` ``(labels, channels, bands)``: Strength of each rhythm.
    - ``centres`` (frequency, width): One for each band, in hertz.
    - returns ``(labels, channels, samples // 2 + 1)``
    """
    frequency = np.fft.rfftfreq(samples, 1 / rate)
    falling = (1.0 + frequency) ** (-0.9 - factors.tilt)
    bands = np.stack([np.exp(-0.5 * ((frequency / factors.shift - centre) / width) ** 2) for centre, width in centres])
    shape = background[..., None] * falling + rhythms @ bands
    hum = factors.hum * np.exp(-0.5 * ((frequency - factors.hum_frequency) / 0.3) ** 2)
    amplitude = shape * np.asarray(factors.gains)[:, None] + factors.noise + hum
    amplitude[..., 0] = 0.0
    as_single: Array = amplitude.astype(np.float32)
    return as_single


def draw_signals(rng: np.random.Generator, amplitude: Array, samples: int) -> Array:
    """Gaussian signals of given amplitude spectra: ``(rows, channels, frequencies)`` to ``(rows, channels, samples)``.

    A flat spectrum of height a gives white noise of standard deviation a.
    """
    noise = rng.standard_normal((*amplitude.shape, 2), dtype=np.float32).view(np.complex64)[..., 0]
    noise *= amplitude * np.float32(np.sqrt(samples / 2))
    signals: Array = fft.irfft(noise, n=samples, axis=-1)
    return signals


def check_request(patients: int, most: int, what: str) -> None:
    """Raise if no patient, or more than the ids can name, are asked for."""
    if patients < 1:
        raise ConfigError(f"the number of patients must be 1 or more, not {patients}")
    if patients > most:
        raise ConfigError(f"{what} has names for at most {most} patients; {patients} were asked for")
