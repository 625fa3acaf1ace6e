"""After how many samples a patient is known: how far context trusts what is usual for a patient, read off the data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manydg.data._timeline import Timeline
from manydg.data.dataset import DomainDataset

MOST = 10_000.0
_ROWS = 500_000
_COLUMNS_AT_ONCE = 16


def samples_until_known(values: Tensor, domains: Tensor, times: Tensor | None = None) -> float | None:
    """The number of neighbouring samples whose mean is as good a guess of a patient's mean as the population's is.

    Patients are cut in time into pieces of 1, 2, 4, 8, ... samples. A piece's mean errs by its squared distance from
    its patient's mean; the population's mean errs by the variance of patients' means. Where both err alike, each
    deserves half of the trust, and that is what :class:`manydg.data.context.ContextOptions` calls ``strength``. Where
    neighbouring samples are alike (epochs of one stage of sleep) it takes many; where a patient's values differ more
    from other patients' than from each other (most laboratory values), one is enough.

    Parameters
    ----------
    values : Tensor ``(rows, n)``
        NaN is passed over.
    domains, times : Tensor ``(rows,)``

    Returns
    -------
    float or None
        Between 1 and 10,000, the median over columns; ``None`` where fewer than three patients have two samples.

    Examples
    --------
    >>> who = torch.arange(40).repeat_interleave(64)
    >>> noise = torch.randn(40 * 64, 1, generator=torch.Generator().manual_seed(0))
    >>> samples_until_known(noise + who[:, None], who)
    1.0
    """
    line = Timeline.of(domains, times, None)
    count = line.last - line.patient + 1
    if int(((line.patient == torch.arange(len(line), device=domains.device)) & (count > 1)).sum()) < 3:
        return None
    order = line.order
    pieces = [values[:, start : start + _COLUMNS_AT_ONCE] for start in range(0, values.shape[1], _COLUMNS_AT_ONCE)]
    errors = torch.cat([_errors(piece[order].to(torch.float64), line, count) for piece in pieces], dim=1)
    ratios = torch.stack([row.nanmedian() for row in errors]).tolist()
    return min(max(_crossing(ratios), 1.0), MOST)


def known_rows(dataset: DomainDataset) -> Tensor:
    """Rows of whole patients, at most about 500,000, spread over all patients: enough to learn a single number from."""
    counts = torch.bincount(dataset.domains, minlength=dataset.n_patients)
    every = max(1, math.ceil(len(dataset) / _ROWS))
    present = torch.nonzero(counts).squeeze(1)
    chosen = torch.zeros_like(counts, dtype=torch.bool)
    chosen[present[::every]] = True
    return torch.nonzero(chosen[dataset.domains]).squeeze(1)


def _errors(values: Tensor, line: Timeline, count: Tensor) -> Tensor:
    """Mean squared error of pieces of 1, 2, 4, ... rows, over the variance of patients' means: ``(sizes, n)``.

    NaN where a column tells nothing, because patients' means are all the same or no piece is complete.
    """
    known = ~torch.isnan(values)
    centred = torch.where(known, values - values.nanmean(dim=0), 0.0)
    # Totals up to and with each row, of all patients: their differences are sums over any stretch of rows.
    sums, seen = (_totals(each) for each in (centred, known.to(torch.float64)))
    start, last = line.patient, line.last + 1
    mean = (sums[last] - sums[start]) / (seen[last] - seen[start])
    first = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    first[line.patient] = True
    of_patients = mean[first]
    spread = (of_patients - of_patients.nanmean(dim=0)).square().nanmean(dim=0)
    spread = torch.where(spread > 1e-12 * values.square().nanmean(dim=0), spread, torch.nan)
    place = torch.arange(len(values), device=values.device) - line.patient
    found, size = [], 1
    while 2 * size <= int(count.max()):
        ends = torch.nonzero(((place + 1) % size == 0) & (count >= 2 * size)).squeeze(1) + 1
        complete = seen[ends] - seen[ends - size] == size
        error = ((sums[ends] - sums[ends - size]) / size - mean[ends - 1]).square()
        found.append(torch.where(complete, error, torch.nan).nanmean(dim=0) / spread)
        size *= 2
    return torch.stack(found)


def _totals(values: Tensor) -> Tensor:
    """Sums of the first 0, 1, 2, ... rows: ``(rows + 1, n)``."""
    return torch.cat([values.new_zeros(1, values.shape[1]), values.cumsum(dim=0)])


def _crossing(ratios: list[float]) -> float:
    """The size at which the ratio falls to 1: between two sizes by their logarithms, beyond the last in proportion."""
    size, previous = 1, math.nan
    for ratio in ratios:
        if math.isnan(ratio):
            break
        if ratio <= 1:
            if math.isnan(previous):
                return 1.0
            share = math.log(previous) / (math.log(previous) - math.log(max(ratio, 1e-300)))
            return size / 2 * 2**share
        size, previous = 2 * size, ratio
    return MOST if math.isnan(previous) else size / 2 * previous
