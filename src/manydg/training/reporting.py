"""What a training run tells while it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Reporter(Protocol):
    """Hears how a run is going. Calls come from the training loop, never inside a step."""

    def started(self, algorithm: str, epochs: int, first_epoch: int) -> None: ...

    def epoch_ended(self, entry: Mapping[str, Any]) -> None:
        """``entry`` is the epoch's line of the history: epoch, losses, validation metrics, seconds."""

    def finished(self, record: Mapping[str, Any]) -> None: ...


class Silent:
    """Says nothing."""

    def started(self, algorithm: str, epochs: int, first_epoch: int) -> None:
        pass

    def epoch_ended(self, entry: Mapping[str, Any]) -> None:
        pass

    def finished(self, record: Mapping[str, Any]) -> None:
        pass
