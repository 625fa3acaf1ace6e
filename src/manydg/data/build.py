"""A DomainDataset from arrays in memory, with every mistake named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.data.columns import Column, Ragged
from manydg.data.dataset import DomainDataset
from manydg.data.encoding import ArrayLike, encode_patients, encode_targets
from manydg.data.info import DatasetInfo
from manydg.errors import DataError
from manydg.files import ParsedJson


def from_arrays(
    inputs: ArrayLike | Mapping[str, ArrayLike | Ragged],
    targets: ArrayLike | Sequence[Any],
    patients: ArrayLike | Sequence[Any],
    *,
    kind: str | None = None,
    names: Sequence[str] | None = None,
    times: ArrayLike | None = None,
    missing: bool = False,
    info: DatasetInfo | ParsedJson | None = None,
) -> DomainDataset:
    """Build a dataset from arrays.

    Parameters
    ----------
    inputs : array ``(rows, ...)`` or dict of name to array or Ragged
        A single array becomes the column ``x``.
    targets : array
        Class labels of any kind ``(rows,)``, votes or label indicators ``(rows, K)``.
    patients : array ``(rows,)``
        The patient of each sample.
    kind : str, optional
        Target kind; without it, ``(rows, K)`` of 0 and 1 is multi-label, other ``(rows, K)`` are votes, two labels that
        read as 0 and 1 (or false and true) are binary, and anything else is classes.
    names : sequence of str, optional
        Class names in code order; without them, the sorted labels that occur.
    missing : bool
        Whether NaN is a legitimate value (a measurement not taken). Infinity never is.
    info : DatasetInfo, or a dict of its entries, optional
        What else is known: vocabularies, settings, provenance.

    Examples
    --------
    >>> data = from_arrays(np.zeros((4, 2)), ["n2", "wake", "n2", "rem"], [7, 7, 9, 9])
    >>> data
    DomainDataset(4 samples of 2 patients, inputs x; classes of 3)
    """
    named = inputs if isinstance(inputs, Mapping) else {"x": inputs}
    columns = {name: as_column(name, column, missing=missing) for name, column in named.items()}
    codes, who = encode_patients(patients)
    values, spec = encode_targets(targets, kind, names)
    return DomainDataset(
        columns=columns,
        targets=values,
        target=spec,
        domains=codes,
        patients=who,
        times=None if times is None else torch.as_tensor(times, dtype=torch.float64),
        info=_with_missing(DatasetInfo.of(info), missing),
    )


def _with_missing(info: DatasetInfo, missing: bool) -> DatasetInfo:
    """Note in the settings that values may be missing, so that a backbone that can take them is chosen."""
    return replace(info, settings={**info.settings, "missing": True}) if missing else info


def as_column(name: str, column: ArrayLike | Ragged, *, missing: bool) -> Column:
    """Check one input column and store it as float32 or int64."""
    if isinstance(column, Ragged):
        return Ragged(as_column(name, column.values, missing=missing), column.offsets)
    if np.ndim(column) == 0:
        raise DataError(f"input '{name}' is a single number; it needs one row per sample")
    array = column if isinstance(column, Tensor) else _tensor_from_numpy(name, np.asarray(column))
    if not array.is_floating_point():
        return array.to(torch.int64)
    array = array.to(torch.float32)
    bad = torch.isinf(array) if missing else ~torch.isfinite(array)
    if bool(bad.any()):
        where = torch.nonzero(bad)[0].tolist()
        remedy = "replace it" if missing else "replace it, or declare missing values (missing=True, --missing keep)"
        raise DataError(
            f"input '{name}' holds {int(bad.sum())} values that are not finite, the first in row {where[0]}"
            + (f", position {where[1:]}" if len(where) > 1 else "")
            + f": {remedy}"
        )
    return array


def _tensor_from_numpy(name: str, array: npt.NDArray[Any]) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise DataError(f"input '{name}' has type {array.dtype}; inputs are numbers: encode text as codes first")
    # NumPy knows types (unsigned, long double, foreign byte orders) that torch does not take.
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32 if array.dtype.kind == "f" else np.int64))
