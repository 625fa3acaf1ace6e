"""Arrays of your own: samples, targets and patients in three ``.npy`` files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data.info import DatasetInfo
from manydg.errors import DataError, StorageError
from manydg.sources._dense import write_dense
from manydg.sources._preparing import CohortFlow, with_provenance


def prepare(
    x: str | Path,
    y: str | Path,
    patient: str | Path,
    out: str | Path,
    *,
    time: str | Path | None = None,
    kind: str | None = None,
    classes: Sequence[str] | None = None,
    rate: float | None = None,
    missing: str = "refuse",
    overwrite: bool = False,
) -> Path:
    """Write arrays as a dataset folder; they are memory-mapped, so that they may be larger than memory.

    Parameters
    ----------
    x : path
        Samples, ``(rows, ...)`` numbers; stored as float32 in the input column ``x``.
    y : path
        Class labels ``(rows,)``, or expert votes or label indicators ``(rows, K)``.
    patient : path
        Whose sample each row is, ``(rows,)`` numbers or text.
    out : path
        The dataset folder to write.
    time : path, optional
        When each sample was taken, ``(rows,)`` numbers.
    kind : {"classes", "votes", "binary", "multilabel"}, optional
        What the target is, where it cannot be told from its values.
    classes : sequence of str, optional
        Names of the classes in the order of their codes.
    rate : float, optional
        Sampling rate in hertz: says that the samples are signals, ``(rows, channels, samples)`` in microvolts, which
        are then stored in the input column ``signal``.
    missing : {"refuse", "keep"}
        Whether NaN is an error, or a measurement not taken.
    overwrite : bool
        Replace a dataset folder that is already there.

    Returns
    -------
    Path
        The dataset folder.
    """
    paths = {"x": Path(x), "y": Path(y), "patient": Path(patient), **({} if time is None else {"time": Path(time)})}
    arrays = {role: _load(path) for role, path in paths.items()}
    _check(arrays, paths)
    settings: dict[str, Any] = {}
    if rate is not None:
        settings = _signal_settings(arrays["x"], paths["x"], rate)
    flow = CohortFlow()
    patients = np.asarray(arrays["patient"])
    flow.add("rows of the arrays", patients=len(np.unique(patients)), samples=len(patients))
    options = {"kind": kind, "rate": rate, "missing": missing, **{role: path.name for role, path in paths.items()}}
    return write_dense(
        out,
        arrays["x"],
        np.asarray(arrays["y"]),
        patients,
        column="x" if rate is None else "signal",
        place=lambda position: f"{paths['x'].name}: position {list(position)}",
        files={"target": paths["y"], "patient": paths["patient"]},
        kind=kind,
        classes=classes,
        times=np.asarray(arrays["time"], dtype=np.float64) if "time" in arrays else None,
        missing=missing,
        info=with_provenance(DatasetInfo(settings=settings), "arrays", list(paths.values()), options, flow),
        overwrite=overwrite,
    )


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise StorageError(f"there is no file {path}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, SyntaxError):
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
        found = ", ".join(f"{paths[role].name} {count}" for role, count in rows.items())
        raise DataError(f"the arrays have different numbers of rows: {found}")
    if rows["x"] == 0:
        raise DataError(f"{paths['x']} has no rows")
    for role in ("x", *(["time"] if "time" in arrays else [])):
        if arrays[role].dtype.kind not in "fiub":
            raise DataError(f"{paths[role]} has type {arrays[role].dtype}; it must hold numbers: encode text as codes")
    if arrays["x"].ndim == 1:
        raise DataError(f"{paths['x']} has shape {arrays['x'].shape}; samples are (rows, features) or (rows, ..., ...)")


def _signal_settings(samples: npt.NDArray[Any], path: Path, rate: float) -> dict[str, Any]:
    if samples.ndim != 3:
        raise DataError(f"{path} has shape {samples.shape}; signals are (rows, channels, samples)")
    if not rate > 0:
        raise DataError(f"a sampling rate is a number of hertz above 0; got {rate}")
    channels = [f"channel {number + 1}" for number in range(samples.shape[1])]
    return {"rate": float(rate), "channels": channels, "unit": "uV"}
