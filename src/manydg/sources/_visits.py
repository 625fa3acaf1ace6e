"""Hospital visits with their history as ragged columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import Column, Ragged
from manydg.sources._event_rows import offsets_of, ranges

IntArray = npt.NDArray[np.int64]


def codes_by_visit(visits: pl.DataFrame, codes: pl.DataFrame, words: Sequence[str]) -> Ragged:
    """The codes of each visit, as indices into a vocabulary.

    Parameters
    ----------
    visits : DataFrame
        One row a visit, with ``hadm_id``.
    codes : DataFrame
        ``hadm_id`` and ``code``; rows of other visits are ignored.
    words : sequence of str
        The vocabulary. Where its first word is ``<unknown>`` a code that is not in it counts as that, else it is left
        out.

    Returns
    -------
    Ragged
        ``(visits,)`` rows of sorted, different code indices.
    """
    numbered = visits.select("hadm_id").with_row_index("visit")
    index = pl.DataFrame({"code": list(words), "index": range(len(words))}, {"code": pl.String, "index": pl.Int64})
    found = codes.join(numbered, on="hadm_id").join(index, on="code", how="left")
    found = found.with_columns(pl.col("index").fill_null(0)) if list(words[:1]) == ["<unknown>"] else found.drop_nulls()
    found = found.select(pl.col("visit").cast(pl.Int64), "index").unique().sort("visit", "index")
    lengths = np.bincount(found["visit"].to_numpy(), minlength=visits.height)
    return Ragged(torch.from_numpy(found["index"].to_numpy().copy()), offsets_of(lengths))


def visit_columns(
    patients: IntArray,
    complete: npt.NDArray[np.bool_],
    rows: IntArray,
    codes: Mapping[str, Ragged],
) -> dict[str, Column]:
    """Input columns of some visits, each with its patient's earlier complete visits.

    Parameters
    ----------
    patients : array ``(visits,)``
        Whose each visit is; a patient's visits stand together, in the order of admission.
    complete : array ``(visits,)``
        Whether a visit may serve as history.
    rows : array ``(rows,)``
        The visits to make samples of.
    codes : dict
        ``diagnoses``, ``procedures`` and ``drugs`` of every visit.

    Returns
    -------
    dict
        ``diagnoses`` and ``procedures``: earlier visits and the current one, last; ``history_drugs``: earlier only.
    """
    chosen = np.flatnonzero(complete)
    before = np.concatenate([[0], np.cumsum(complete)])
    first = _first_of(patients)[rows]
    start, count = before[first], before[rows] - before[first]
    earlier = chosen[ranges(start, count)]
    with_current = np.empty(len(earlier) + len(rows), np.int64)
    last = np.cumsum(count + 1) - 1
    is_current = np.zeros(len(with_current), bool)
    is_current[last] = True
    with_current[is_current], with_current[~is_current] = rows, earlier
    columns: dict[str, Column] = {
        name: Ragged(codes[name].take(torch.from_numpy(with_current)), offsets_of(count + 1))
        for name in ("diagnoses", "procedures")
    }
    columns["history_drugs"] = Ragged(codes["drugs"].take(torch.from_numpy(earlier)), offsets_of(count))
    return columns


def multi_hot(drugs: Ragged, rows: IntArray, size: int) -> npt.NDArray[np.float32]:
    """Label indicators ``(rows, size)`` of the visits at the given positions."""
    taken = drugs.take(torch.from_numpy(rows))
    labels = np.zeros((len(rows), size), np.float32)
    labels[taken.row_of_item().numpy(), np.asarray(taken.values)] = 1.0
    return labels


def _first_of(groups: IntArray) -> IntArray:
    """For each position, where its run of equal values begins."""
    begins = np.concatenate([[True], groups[1:] != groups[:-1]]) if len(groups) else np.zeros(0, bool)
    starts: IntArray = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    return starts
