"""The order of an epoch's samples, made while the epoch before it is trained."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass

from manydg.algorithms import Algorithm
from manydg.data.blocks import BlockPlan, plan_in_blocks
from manydg.data.dataset import DomainDataset
from manydg.data.sampling import EpochPlan, plan_epoch
from manydg.training.config import TrainingConfig
from manydg.training.memory import rows_of_window
from manydg.training.rooms import lengths_of


@dataclass(frozen=True)
class EpochOrder:
    """What each step of an epoch sees, and the windows it goes by where the data do not fit in memory."""

    plan: EpochPlan
    windows: BlockPlan | None


class Orders:
    """The orders of a training's epochs: of all samples, or by windows where they do not fit in memory.

    An order follows from the seed and the epoch alone, so that the next one can be made ahead of time.
    """

    def __init__(self, algorithm: Algorithm, train: DomainDataset, config: TrainingConfig) -> None:
        self._train, self._config, self._sampling = train, config, algorithm.sampling
        self._domains, self._lengths = train.domains.cpu(), lengths_of(train)
        self.rows_of_window = rows_of_window(train)
        self._coming: dict[int, Future[EpochOrder]] = {}

    def of(self, epoch: int, worker: Executor) -> EpochOrder:
        """The order of an epoch; the worker is set to make that of the next."""
        coming = self._coming.pop(epoch, None)
        order = self._make(epoch) if coming is None else coming.result()
        if epoch < self._config.epochs:
            self._coming[epoch + 1] = worker.submit(self._make, epoch + 1)
        return order

    def _make(self, epoch: int) -> EpochOrder:
        batch_size, seed = self._config.batch_size, self._config.seed
        if self.rows_of_window is None:
            return EpochOrder(plan_epoch(self._sampling, self._domains, batch_size, seed, epoch, self._lengths), None)
        windows = plan_in_blocks(self._sampling, self._train, batch_size, seed, epoch, self.rows_of_window)
        return EpochOrder(windows.plan, windows)
