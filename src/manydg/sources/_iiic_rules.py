"""Which IIIC samples are used: the vote rule, values that are not finite, and artefacts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.errors import ConfigError

CLASSES = ("OTHER", "ESZ", "LPD", "GPD", "LRDA", "GRDA")
KEPT, FEW_VOTES, NOT_FINITE, LOUD, FLAT = range(5)


@dataclass(frozen=True)
class Rules:
    """Which rows become samples, and how values become microvolts."""

    min_votes: int = 5
    unvoted: str = "refuse"
    scale: float = 1.0
    max_amplitude: float | None = None
    flat_below: float | None = None
    vote_order: tuple[str, ...] = CLASSES

    def __post_init__(self) -> None:
        if self.min_votes < 1:
            raise ConfigError(f"the least number of votes must be 1 or more, not {self.min_votes}")
        if self.unvoted not in ("refuse", "skip"):
            raise ConfigError(f"rows without votes can be met with 'refuse' or 'skip', not '{self.unvoted}'")
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(f"the scale must be a positive number, not {self.scale}")
        if sorted(self.vote_order) != sorted(CLASSES):
            raise ConfigError(f"the vote order must name each of {', '.join(CLASSES)} once")
        for name, value in (("amplitude", self.max_amplitude), ("flatness", self.flat_below)):
            if value is not None and not value > 0:
                raise ConfigError(f"the {name} limit is a positive number of microvolts, not {value}")


def judge(stored: npt.NDArray[Any], rules: Rules) -> npt.NDArray[np.uint8]:
    """Whether the signals of a block are fit to use, ``(rows,)``: values that are not finite, artefacts, or kept."""
    verdicts = np.full(len(stored), KEPT, np.uint8)
    if stored.dtype.kind == "f":
        # A sum is finite only if every term is: one fast pass finds the few rows that need a closer look.
        with np.errstate(invalid="ignore", over="ignore"):
            suspects = np.nonzero(~np.isfinite(stored.sum(axis=(1, 2))))[0]
        verdicts[suspects[~np.isfinite(stored[suspects]).all(axis=(1, 2))]] = NOT_FINITE
    usable = np.nonzero(verdicts == KEPT)[0]
    signals = stored if len(usable) == len(stored) else stored[usable]
    if rules.flat_below is not None:
        flat = signals.std(axis=2, dtype=np.float32) < rules.flat_below / rules.scale
        verdicts[usable[flat.any(axis=1)]] = FLAT
    if rules.max_amplitude is not None:
        most = rules.max_amplitude / rules.scale
        verdicts[usable[(signals.max(axis=(1, 2)) > most) | (signals.min(axis=(1, 2)) < -most)]] = LOUD
    return verdicts
