"""One block of numbers per sample to a dataset folder, checked and written piece by piece."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from manydg.data.encoding import encode_patients, encode_targets
from manydg.data.info import DatasetInfo, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import DataError, ManyDGWarning

MISSING = ("refuse", "keep")
PositionName = Callable[[tuple[int, ...]], str]
"""What messages call a position within a sample."""
_PIECE_BYTES = 1 << 26
_NAMED = 8


def write_dense(
    out: str | Path,
    values: npt.NDArray[Any],
    targets: npt.NDArray[Any],
    patients: npt.NDArray[Any],
    *,
    column: str = "x",
    position_name: PositionName,
    files: Mapping[str, Path],
    kind: str | None = None,
    classes: Sequence[str] | None = None,
    times: npt.NDArray[np.float64] | None = None,
    missing: str = "refuse",
    info: DatasetInfo,
    overwrite: bool = False,
) -> Path:
    """Check dense samples and write them as a dataset folder, in memory of one piece.

    Parameters
    ----------
    values : array ``(rows, ...)``
        Numbers of any type; may be memory-mapped. They are stored as float32.
    targets, patients : arrays
        As :func:`manydg.from_arrays` takes them.
    position_name : callable
        What messages call a position within a sample.
    files : dict
        The files that ``target`` and ``patient`` come from, for messages.
    missing : {"refuse", "keep"}
        Whether NaN is an error or a measurement not taken.
    """
    with naming(files["target"]):
        labels, target = encode_targets(targets, kind, classes)
        _check_target(labels, target)
    with naming(files["patient"]):
        _check_patients(patients)
    settings = {**info.settings, **({"missing": True} if missing == "keep" else {})}
    value_range = _Range(values.shape[1:])
    step = max(1, _PIECE_BYTES // max(1, 4 * math.prod(values.shape[1:])))
    with DatasetWriter(out, target, replace(info, settings=settings), overwrite=overwrite) as writer:
        for start in range(0, len(values), step):
            rows = slice(start, start + step)
            with np.errstate(over="ignore"):
                piece = np.asarray(values[rows], dtype=np.float32)
            check_finite(piece, start, missing, position_name)
            value_range.update(piece)
            when = None if times is None else times[rows]
            writer.append({column: piece}, labels.numpy()[rows], patients[rows], when)
    _warn_of_constants(value_range.constant(), position_name)
    return Path(out)


def _warn_of_constants(constant: Sequence[tuple[int, ...]], position_name: PositionName) -> None:
    if constant:
        named = ", ".join(position_name(position) for position in constant[:_NAMED])
        more = f" and {len(constant) - _NAMED} more" if len(constant) > _NAMED else ""
        warnings.warn(f"the same value in every sample: {named}{more}. They tell nothing", ManyDGWarning, stacklevel=4)


def _check_target(labels: Tensor, target: TargetSpec) -> None:
    if target.kind == "classes" and target.size > max(20, len(labels) // 2):
        raise DataError(f"the target has {target.size} different values in {len(labels)} samples: is it a measurement?")


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the file's name to errors about data."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


class _Range:
    """Lowest and highest value seen at each position of a sample."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.low = np.full(shape, np.inf, dtype=np.float32)
        self.high = np.full(shape, -np.inf, dtype=np.float32)

    def update(self, piece: npt.NDArray[np.float32]) -> None:
        self.low = np.fmin(self.low, np.fmin.reduce(piece, axis=0, initial=np.inf))
        self.high = np.fmax(self.high, np.fmax.reduce(piece, axis=0, initial=-np.inf))

    def constant(self) -> list[tuple[int, ...]]:
        """Positions with one value only, or none at all."""
        return [tuple(map(int, position)) for position in np.argwhere(self.high <= self.low)]


def check_finite(piece: npt.NDArray[np.float32], start: int, missing: str, position_name: PositionName) -> None:
    """Raise if a value of some samples is infinite or, unless missing values are kept, missing.

    Parameters
    ----------
    piece : array ``(rows, ...)``
    start : int
        The number of the first of these rows.
    missing : {"refuse", "keep"}
    position_name : callable
        What messages call a position within a sample.
    """
    bad = np.isinf(piece) if missing == "keep" else ~np.isfinite(piece)
    if not bad.any():
        return
    first = tuple(map(int, np.argwhere(bad)[0]))
    value = float(piece[first])
    what = "missing" if math.isnan(value) else "infinite, or too large for float32"
    remedy = "replace it" if missing == "keep" or not math.isnan(value) else "fill it in, or keep it (--missing keep)"
    others = int(bad.sum()) - 1
    more = f", and so are {others} values in the rows after it" if others else ""
    raise DataError(
        f"{position_name(first[1:])} in row {start + first[0]} (the first row is 0) is {what}{more}: {remedy}"
    )


def _check_patients(patients: npt.NDArray[Any]) -> None:
    codes, names = encode_patients(patients)
    if len(names) < 2:
        raise DataError("all samples are of one patient: a model for new patients needs samples of several")
    if len(names) == len(codes):
        warnings.warn(
            f"each of the {len(codes)} samples has a patient of its own, so that there are no pairs to learn from: "
            "is the patient column a row number?",
            ManyDGWarning,
            stacklevel=4,
        )
