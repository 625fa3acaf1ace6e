"""The training loop: epochs from a plan, the best epoch by a validation metric, a checkpoint after each.

Randomness is drawn anew from (seed, epoch) at every epoch's start, so that a run which was killed and started again
goes on exactly as if nothing had happened.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manydg.algorithms import Algorithm
from manydg.data.dataset import DomainDataset
from manydg.data.sampling import EpochPlan, plan_epoch
from manydg.errors import DataError, StorageError, TrainingError
from manydg.evaluation.metrics import choose_threshold, score
from manydg.training.checkpoint import pack_optimizer, read_tensors, same_device, unpack_optimizer, write_tensors
from manydg.training.config import TrainingConfig
from manydg.training.distributed import by_leader, current_team, part_ways
from manydg.training.inference import device_of, predict_probabilities
from manydg.training.memory import keeping_freed_memory, reading_ahead
from manydg.training.ordering import EpochOrder, Orders
from manydg.training.precision import PLAIN, at_speed, settle_speed
from manydg.training.reporting import Reporter
from manydg.training.steps import Steps, Terms, read_terms, steps_for

CHECKPOINT = "checkpoint.safetensors"
_STEPS_BETWEEN_CHECKS = 200
_BATCHES_WATCHED = 16


class TrainingLoop:
    """Trains one algorithm and leaves the weights of its best epoch in it, or of its last without validation patients.

    Parameters
    ----------
    algorithm : Algorithm
        On the device to train on.
    train, val : DomainDataset
        Training and validation patients; ``None`` where too few are there to hold any back.
    config : TrainingConfig
    metric : str
        Validation metric that chooses the epoch; higher is better.
    folder : Path, optional
        Where the checkpoint lives; an unfinished run found there is continued.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        train: DomainDataset,
        val: DomainDataset | None,
        config: TrainingConfig,
        metric: str,
        folder: Path | None,
        reporter: Reporter,
    ) -> None:
        self.algorithm, self.train, self.val, self.config = algorithm, train, val, config
        self.metric, self.reporter = metric, reporter
        self.checkpoint = None if folder is None else folder / CHECKPOINT
        self.optimizers = algorithm.optimizers(config.lr, config.weight_decay)
        self.speed = settle_speed(config, algorithm, train, device_of(algorithm))
        if current_team() is not None and self.speed.captures:
            # Exchanges between processes are not part of a captured step.
            self.speed = replace(self.speed, execution=PLAIN)
        self.orders = Orders(algorithm, train, config)
        self.history: list[dict[str, Any]] = []
        self.best_epoch = 0
        self.best: dict[str, Tensor] = {}

    def run(self) -> None:
        """Train to the end, from the checkpoint if there is one."""
        if self.checkpoint is not None and self.checkpoint.exists():
            self._resume(self.checkpoint)
        self.steps = self._make_steps()
        done = len(self.history)
        self.reporter.started(self.config.algorithm, self.config.epochs, done + 1)
        keeping = keeping_freed_memory() if device_of(self.algorithm).type == "cpu" else nullcontext()
        with keeping, ThreadPoolExecutor(max_workers=1) as worker:
            for epoch in range(done + 1, self.config.epochs + 1):
                self._run_epoch(epoch, worker)
        if current_team() is not None:
            part_ways(self.algorithm)
        self.algorithm.load_state_dict(self.best)

    def _make_steps(self) -> Steps:
        team, device = current_team(), device_of(self.algorithm)
        if team is None:
            return steps_for(self.algorithm, self.train, self.optimizers, device, self.speed)
        from manydg.training.sharing import SharedSteps

        return SharedSteps(team, self.algorithm, self.train, self.optimizers, device)

    @property
    def selection_rule(self) -> str:
        """How the epoch was chosen whose weights are kept."""
        if self.val is None:
            return "last epoch: no patients were held back to choose one"
        return f"epoch with the highest validation {self.metric}"

    def _run_epoch(self, epoch: int, worker: Executor) -> None:
        start = time.perf_counter()
        torch.manual_seed(self.config.seed * 1_000_003 + epoch)
        order = self.orders.of(epoch, worker)
        self.algorithm.train()
        with at_speed(self.speed, self.algorithm, device_of(self.algorithm)):
            losses = self._run_steps(order, epoch)
        trained = time.perf_counter()
        val = {} if self.val is None else self._validate(self.val, epoch, len(order.plan))
        entry = {"epoch": epoch, "losses": losses, "val": val, "seconds": trained - start}
        if order.windows is not None:
            rows, windows = self.orders.rows_of_window, len(order.windows.windows)
            entry["order"] = f"windows of about {rows} rows on disk, {windows} of them"
        if self.val is not None and (watched := self._watch(self.val)):
            entry["val_terms"] = watched
        self.history.append(entry)
        if self._is_best(val):
            self.best_epoch = epoch
            self.best = {name: tensor.detach().clone() for name, tensor in self.algorithm.state_dict().items()}
        if self.checkpoint is not None:
            by_leader(partial(self._save, self.checkpoint))
        self.reporter.epoch_ended(entry)

    def _steps_of(self, order: EpochOrder) -> Iterator[Callable[[], Terms]]:
        steps = self.steps.run(order.plan)
        return steps if order.windows is None else reading_ahead(self.train, order.windows, steps)

    def _is_best(self, val: Mapping[str, float | None]) -> bool:
        if self.val is None or self.best_epoch == 0:
            return True
        return _better(val[self.metric], self.history[self.best_epoch - 1]["val"][self.metric])

    def _run_steps(self, order: EpochOrder, epoch: int) -> dict[str, float]:
        """All steps of an epoch; the loss terms are read in blocks, on a GPU once, so that nothing waits for it."""
        plan = order.plan
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        block: list[Terms] = []
        size = _STEPS_BETWEEN_CHECKS if device_of(self.algorithm).type == "cpu" else len(plan)
        for step, do_step in enumerate(self._steps_of(order)):
            self.algorithm.progress.fill_((epoch - 1 + step / len(plan)) / self.config.epochs)
            block.append(do_step())
            if len(block) == size or step == len(plan) - 1:
                values = read_terms(block)
                self._check_finite(values, step + 1 - len(block), plan, epoch)
                for name, column in values.items():
                    sums[name] = sums.get(name, 0.0) + sum(value for value in column if value is not None)
                    counts[name] = counts.get(name, 0) + sum(value is not None for value in column)
                block = []
        return {name: sums[name] / counts[name] for name in sums}

    def _check_finite(
        self, values: Mapping[str, list[float | None]], first_step: int, plan: EpochPlan, epoch: int
    ) -> None:
        bad = [
            (place, name)
            for name, column in values.items()
            for place, value in enumerate(column)
            if value is not None and not math.isfinite(value)
        ]
        if not bad:
            return
        place, name = min(bad)
        step = first_step + place
        rows = plan.indices[plan.bounds[step] : plan.bounds[step + 1]]
        patients = len(torch.unique(self.train.domains.cpu()[rows]))
        raise TrainingError(
            f"the loss term '{name}' is {values[name][place]} at step {step + 1} of epoch {epoch} "
            f"(a batch of {len(rows)} samples of {patients} patients, first rows {rows[:5].tolist()} of the training "
            f"set); {self._kept()}. Try a smaller learning rate than {self.config.lr:g}, or look at those samples"
        )

    def _kept(self) -> str:
        if not self.history:
            return "no epoch was finished"
        where = "" if self.checkpoint is None else f" in {self.checkpoint}"
        return f"epoch {len(self.history)} is kept{where}"

    def _validate(self, data: DomainDataset, epoch: int, steps: int) -> dict[str, float | None]:
        target = self.algorithm.target
        truth = target.truth(data.targets).cpu().numpy()
        probabilities = predict_probabilities(self.algorithm, data).numpy()
        bad = int((~np.isfinite(probabilities)).any(axis=1).sum())
        if bad:
            raise TrainingError(
                f"after step {steps}, the last of epoch {epoch}, the predictions for {bad} of {len(data)} validation "
                f"samples are not finite; {self._kept()}. Try a smaller learning rate than {self.config.lr:g}"
            )
        threshold, _ = choose_threshold(target, truth, probabilities)
        metrics = {name: _or_none(value) for name, value in score(target, truth, probabilities, threshold).items()}
        if metrics.get(self.metric) is None:
            raise DataError(
                f"the validation {self.metric} is undefined: too few classes are to be seen in {data.n_patients} "
                "validation patient(s). Take another seed, or more of them, as with ratios=(0.6, 0.2, 0.2) "
                "(--set training.ratios=[0.6,0.2,0.2])"
            )
        return metrics

    def _watch(self, data: DomainDataset) -> dict[str, float | None]:
        """The algorithm's watched terms on pairs of validation samples, the same pairs after every epoch."""
        plan = plan_epoch("pairs", data.domains, self.config.batch_size, self.config.seed, 0).to(data.device)
        found: list[Terms] = []
        self.algorithm.eval()
        with torch.inference_mode():
            for indices, pairs in itertools.islice(plan, _BATCHES_WATCHED):
                terms = self.algorithm.watched(data.take(indices, pairs).to(device_of(self.algorithm)))
                if not terms:
                    return {}
                found.append(Terms.of(terms))
        columns = {name: [value for value in column if value is not None] for name, column in read_terms(found).items()}
        return {name: _or_none(sum(values) / len(values)) for name, values in columns.items()}

    def _save(self, path: Path) -> None:
        tensors = {f"model/{name}": tensor for name, tensor in self.algorithm.state_dict().items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        meta: dict[str, Any] = {"history": self.history, "best_epoch": self.best_epoch, "optimizers": {}}
        for name, optimizer in self.optimizers.items():
            packed, meta["optimizers"][name] = pack_optimizer(name, optimizer)
            tensors |= {f"optimizer/{key}": tensor for key, tensor in packed.items()}
        write_tensors(path, tensors, meta)

    def _resume(self, path: Path) -> None:
        tensors, meta = read_tensors(path)
        device = device_of(self.algorithm)
        states = _under("optimizer/", tensors)
        try:
            self.algorithm.load_state_dict(_under("model/", tensors))
            self.best = same_device(_under("best/", tensors), device)
            for name, optimizer in self.optimizers.items():
                unpack_optimizer(name, optimizer, states, meta["optimizers"][name])
            self.history, self.best_epoch = meta["history"], meta["best_epoch"]
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise StorageError(f"{path} does not fit this run: delete it and run the same command again") from error


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _better(new: float | None, old: float | None) -> bool:
    return new is not None and (old is None or new > old)


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
