"""The order of each epoch: made ahead, the same as if it were not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from manydg.algorithms import build_algorithm
from manydg.backbones import build_backbone
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.data.sampling import plan_epoch
from manydg.targets import target_of
from manydg.training.execution.memory import EpochOrders


class Waiting(ThreadPoolExecutor):
    """Notes what it is given to do."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.given: list[tuple[object, ...]] = []

    def submit(self, make: Callable[..., object], *arguments: object):  # type: ignore[no-untyped-def,override]
        self.given.append(arguments)
        return super().submit(make, *arguments)


def test_the_next_epochs_order_is_made_ahead_and_depends_on_seed_and_epoch_alone(small_dataset: DomainDataset) -> None:
    backbone = build_backbone("mlp", InputSchema.of(small_dataset))
    algorithm = build_algorithm("manydg", backbone, target_of(small_dataset.target), small_dataset.n_patients)
    orders = EpochOrders(algorithm, small_dataset, TrainingConfig(epochs=4, batch_size=16, seed=3))
    with Waiting() as worker:
        found = [orders.of(epoch, worker).plan for epoch in (2, 3, 4)]  # resumed after the first
    assert worker.given == [(3,), (4,)]
    for epoch, plan in zip((2, 3, 4), found, strict=True):
        alone = plan_epoch("pairs", small_dataset.domains, 16, 3, epoch)
        assert torch.equal(plan.indices, alone.indices)
        assert (plan.bounds, plan.pairs) == (alone.bounds, alone.pairs)
    assert not torch.equal(found[0].indices, found[1].indices)
