"""Any arrays: NumPy files of samples, targets and patients."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import check_finite, signal_settings
from manydg.data.info import DatasetInfo
from manydg.data.storage import DAMAGED_NPY
from manydg.data.timeline import clock_of
from manydg.errors import ConfigError, DataError, StorageError
from manydg.files import Json, naming, unpacked_limit
from manydg.sources import KEEP_HELP, NewSamples, Options, RawArgument, Source, SourceDocs, TrainedOn, option
from manydg.sources._preparing import MISSING, CohortFlow, with_provenance, write_dense


@dataclass(frozen=True)
class ArraysOptions(Options):
    """The other arrays, and what they hold."""

    y: Path = option(help="Targets, (rows,) or (rows, K) .npy, or the .npz file with an array y.")
    patient: Path = option(help="Patients, (rows,) .npy, or the .npz file with an array patient.")
    time: Path | None = option(None, help="Times, (rows,) .npy, or the .npz file with an array time.")
    rate: float | None = option(None, help="Sampling rate in Hz, if the samples are signals.")
    kind: str | None = option(
        None,
        help="classes, votes, binary or multilabel, if the values are ambiguous; regression to predict the "
        "number itself.",
    )
    classes: tuple[str, ...] | None = option(
        None, help="Names of the classes in code order, or of the value.", metavar="A,B,...", commas=True
    )
    missing: str = option("refuse", help="refuse empty values, or keep them as not measured.", choices=MISSING)


_KEPT = ("patient", "time")


@dataclass(frozen=True)
class NewArrayOptions(Options):
    """What the table of predictions shows of an ``.npz`` file."""

    keep: tuple[str, ...] = option((), help=KEEP_HELP, metavar="COL")

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.keep if name not in _KEPT]:
            raise ConfigError(f"of arrays {' and '.join(_KEPT)} can be kept, not '{unknown[0]}'")


class Arrays(Source[ArraysOptions, NewArrayOptions]):
    """Arrays of your own, memory-mapped, so that they may be larger than memory.

    ``x`` has the samples, ``(rows, ...)`` numbers; ``y`` class labels ``(rows,)``, or expert votes or label indicators
    ``(rows, K)``. With a rate, samples are signals ``(rows, channels, samples)`` in microvolts, in the input column
    ``signal`` instead of ``x``.
    """

    name = "arrays"
    options_class = ArraysOptions
    prediction_options_class = NewArrayOptions
    raw = RawArgument("Samples, (rows, ...) .npy, or the .npz file with an array x.", "x", flag="--x")
    parallel = False
    self_explanatory = False
    docs = SourceDocs(predicts="your own labels", target="any kind", page="[arrays](datasets/arrays.md)")

    def looks_like(self, folder: Path) -> bool:
        """Never: any array may be one of samples."""
        return False

    def prepare(
        self, raw: Path, out: Path, options: ArraysOptions, *, workers: int = 1, overwrite: bool = False
    ) -> Path:
        paths = {"x": raw, "y": options.y, "patient": options.patient}
        if options.time is not None:
            paths["time"] = options.time
        arrays = {role: _load(path, role) for role, path in paths.items()}
        _check(arrays, paths)
        settings: dict[str, Json] = {}
        if options.rate is not None:
            with naming(raw):
                settings = signal_settings(arrays["x"].shape, options.rate)
        patients = np.asarray(arrays["patient"])
        flow = CohortFlow()
        flow.add("rows of the arrays", patients=len(np.unique(patients)), samples=len(patients))
        plain: dict[str, Json] = {"kind": options.kind, "rate": options.rate, "missing": options.missing}
        described = plain | {role: path.name for role, path in paths.items()}
        info = DatasetInfo(settings=settings)
        return write_dense(
            out, arrays["x"], np.asarray(arrays["y"]), patients, column="x" if options.rate is None else "signal",
            position_name=lambda position: f"position {list(position)}",
            files={"values": raw, "target": options.y, "patient": options.patient}, kind=options.kind,
            classes=options.classes, times=_times(arrays, options.time), missing=options.missing,
            info=with_provenance(info, self.name, list(paths.values()), described, flow, raw=raw), overwrite=overwrite,
        )  # fmt: skip

    def for_prediction(self, raw: Path, trained: TrainedOn, options: NewArrayOptions) -> Iterator[NewSamples]:
        """The samples of an array; without an array of patients beside it, each is taken for a patient of its own."""
        self.check_trained_on(trained)
        beside = {role: _load(raw, role) for role in _KEPT if _holds(raw, role)}
        if absent := [name for name in options.keep if name not in beside]:
            raise DataError(f"{raw} has no array '{absent[0]}' to keep: put it beside x in an .npz file")
        arrays = {"x": _load(raw, "x"), **beside}
        _check(arrays, dict.fromkeys(arrays, raw))
        samples = arrays["x"]
        with np.errstate(over="ignore"):
            values = np.array(samples, dtype=np.float32)
        gaps = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if gaps.any() and not trained.settings.get("missing"):
            raise DataError(
                f"{raw}: {int(gaps.sum())} samples hold missing or infinite values, the first is row "
                f"{int(np.flatnonzero(gaps)[0])}, but the model was trained on complete ones: fill them in"
            )
        check_finite(values, 0, "keep", lambda position: f"{raw}: position {list(position)}")
        column = "signal" if "rate" in trained.settings else "x"
        rows = np.arange(len(values))
        times = _times(beside, raw)
        if times is not None and beside["time"].dtype.kind in "mM":
            beside["time"] = times
        shown = pl.DataFrame({"row": rows} | {name: beside[name] for name in options.keep})
        yield NewSamples({column: torch.from_numpy(values)}, shown, beside.get("patient", rows), times)


def _holds(path: Path, role: str) -> bool:
    """Whether a file holds several arrays, of which one has this name, or its plural."""
    return zipfile.is_zipfile(path) and bool({f"{role}.npy", f"{role}s.npy"} & set(zipfile.ZipFile(path).namelist()))


def _load(path: Path, role: str) -> npt.NDArray[Any]:
    """The array of a file, memory-mapped; of one that holds several, that of this name, or of its plural."""
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            name = role if role in loaded else f"{role}s"
            if name not in loaded:
                raise StorageError(
                    f"{path} has no array '{role}'; it has {', '.join(loaded.files)}: rename one of them"
                )
            size, limit = loaded.zip.getinfo(f"{name}.npy").file_size, unpacked_limit(path)
            if size > limit:
                raise DataError(f"{path}: '{role}' unpacks to {size:,} bytes, more than {limit:,}: save it as .npy")
            return np.asarray(loaded[name])
    except FileNotFoundError:
        raise StorageError(f"there is no file {path}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, *DAMAGED_NPY):
        raise StorageError(
            f"{path} is not a plain .npy array: it is damaged, or holds Python objects, which are never read; "
            "save it with numpy.save from an array of numbers or fixed-width text"
        ) from None


def _times(arrays: dict[str, npt.NDArray[Any]], path: Path | None) -> npt.NDArray[np.float64] | None:
    if path is None or "time" not in arrays:
        return None
    with naming(path):
        return clock_of(arrays["time"])


def _check(arrays: dict[str, npt.NDArray[Any]], paths: dict[str, Path]) -> None:
    for role, array in arrays.items():
        if array.ndim == 0:
            raise DataError(f"{paths[role]} holds a single value; it needs one row per sample")
    rows = {role: len(array) for role, array in arrays.items()}
    if len(set(rows.values())) != 1:
        counts = ", ".join(f"{paths[role].name} {count}" for role, count in rows.items())
        raise DataError(f"the arrays have different numbers of rows: {counts}")
    if rows["x"] == 0:
        raise DataError(f"{paths['x']} has no rows")
    if 0 in arrays["x"].shape:
        raise DataError(f"{paths['x']} has shape {arrays['x'].shape}: there is nothing in it to predict from")
    for role, kinds in (("x", "fiub"), ("time", "fiubmM")):
        if role in arrays and arrays[role].dtype.kind not in kinds:
            raise DataError(f"{paths[role]} has type {arrays[role].dtype}; it must hold numbers: encode text as codes")
    if arrays["x"].ndim == 1:
        raise DataError(f"{paths['x']} has shape {arrays['x'].shape}; samples are (rows, features) or (rows, ..., ...)")
