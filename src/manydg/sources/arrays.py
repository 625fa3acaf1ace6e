"""Any arrays: NumPy files of samples, targets and patients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import signal_settings
from manydg.data.info import DatasetInfo
from manydg.errors import DataError, StorageError
from manydg.files import DAMAGED_NPY, Json
from manydg.sources._preparing import MISSING, CohortFlow, check_finite, naming, with_provenance, write_dense
from manydg.sources._source import NewSamples, Options, RawArgument, Source, SourceDocs, TrainedOn, option


@dataclass(frozen=True)
class ArraysOptions(Options):
    """The other arrays, and what they hold."""

    y: Path = option(help="Targets, (rows,) or (rows, K) .npy.")
    patient: Path = option(help="Patients, (rows,) .npy.")
    time: Path | None = option(None, help="Times, (rows,) .npy.")
    rate: float | None = option(None, help="Sampling rate in Hz, where the samples are signals.")
    kind: str | None = option(
        None,
        help="classes, votes, binary or multilabel, where it cannot be told from the values; regression to predict the "
        "number itself.",
    )
    classes: tuple[str, ...] | None = option(
        None, help="Names of the classes in code order, or of the value.", metavar="A,B,...", commas=True
    )
    missing: str = option(
        "refuse", help="refuse empty values, or keep them as measurements not taken.", choices=MISSING
    )


class Arrays(Source[ArraysOptions, Options]):
    """Arrays of your own, memory-mapped, so that they may be larger than memory.

    ``x`` has the samples, ``(rows, ...)`` numbers; ``y`` class labels ``(rows,)``, or expert votes or label indicators
    ``(rows, K)``. With a rate, samples are signals ``(rows, channels, samples)`` in microvolts, in the input column
    ``signal`` instead of ``x``.
    """

    name = "arrays"
    options_class = ArraysOptions
    raw = RawArgument("Samples, (rows, ...) .npy.", "x", flag="--x")
    parallel = False
    self_explanatory = False
    docs = SourceDocs(predicts="your own", target="any kind", page="[arrays](datasets/arrays.md)")

    def looks_like(self, folder: Path) -> bool:
        """Never: any array may be one of samples."""
        return False

    def prepare(
        self, raw: Path, out: Path, options: ArraysOptions, *, workers: int = 1, overwrite: bool = False
    ) -> Path:
        paths = {"x": raw, "y": options.y, "patient": options.patient}
        if options.time is not None:
            paths["time"] = options.time
        arrays = {role: _load(path) for role, path in paths.items()}
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
        return write_dense(
            out,
            arrays["x"],
            np.asarray(arrays["y"]),
            patients,
            column="x" if options.rate is None else "signal",
            position_name=lambda position: f"{raw.name}: position {list(position)}",
            files={"target": options.y, "patient": options.patient},
            kind=options.kind,
            classes=options.classes,
            times=np.asarray(arrays["time"], dtype=np.float64) if "time" in arrays else None,
            missing=options.missing,
            info=with_provenance(
                DatasetInfo(settings=settings), self.name, list(paths.values()), described, flow, raw=raw
            ),
            overwrite=overwrite,
        )

    def for_prediction(self, raw: Path, trained: TrainedOn, options: Options) -> Iterator[NewSamples]:
        """The samples of one array, each taken for a patient of its own."""
        self.check_trained_on(trained)
        samples = _load(raw)
        _check({"x": samples}, {"x": raw})
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
        yield NewSamples({column: torch.from_numpy(values)}, pl.DataFrame({"row": rows}), rows)


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise StorageError(f"there is no file {path}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except DAMAGED_NPY:
        raise StorageError(
            f"{path} is not a plain .npy array: it is damaged, or holds Python objects, which are never read; "
            "save it with numpy.save from an array of numbers or fixed-width text"
        ) from None
    if not isinstance(array, np.ndarray):
        raise StorageError(f"{path} holds several arrays (.npz): save each with numpy.save")
    return array


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
    for role in ("x", *(["time"] if "time" in arrays else [])):
        if arrays[role].dtype.kind not in "fiub":
            raise DataError(f"{paths[role]} has type {arrays[role].dtype}; it must hold numbers: encode text as codes")
    if arrays["x"].ndim == 1:
        raise DataError(f"{paths['x']} has shape {arrays['x'].shape}; samples are (rows, features) or (rows, ..., ...)")
