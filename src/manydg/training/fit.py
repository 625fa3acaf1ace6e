"""From data and a configuration to a trained algorithm: :func:`fit`, and the loop over epochs that it runs.

Random numbers are drawn anew from (seed, epoch) at the start of every epoch, so that a run which was killed and started
again continues exactly as if nothing had happened.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from manydg.algorithms import ALGORITHMS, Algorithm, Rounds
from manydg.algorithms.best import PLAIN, Best, Candidate, Member, candidates, second_is_worse, stack
from manydg.backbones import BACKBONES
from manydg.backbones._sequences import ClassChain, fit_chain
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.data.sampling import EpochPlan, plan_epoch
from manydg.data.timeline import ORDER
from manydg.errors import ConfigError, DataError, ManyDGError, ManyDGWarning, StorageError, TrainingError, unknown_name
from manydg.evaluation.metrics import choose_threshold, score
from manydg.files import Json
from manydg.targets import Target, oriented, target_of
from manydg.training.execution import (
    AS_WRITTEN,
    Execution,
    Speed,
    by_leader,
    check_divisible,
    current_team,
    expect_compiling,
    shared_logits,
    shared_probabilities,
)
from manydg.training.execution.memory import EpochOrder, EpochOrders, place, refusing_what_does_not_fit
from manydg.training.execution.steps import Terms, crops_of, read_terms
from manydg.training.inference import backbone_of, device_of, is_causal, lengths_tell
from manydg.training.record import (
    EpochEntry,
    MemberEntry,
    RunRecord,
    pack_optimizer,
    read_tensors,
    same_device,
    unpack_optimizer,
    write_tensors,
)

CHECKPOINT = "checkpoint.safetensors"
MEMBERS = "members"
"""The folder of the checkpoints of what a model is made of, while it is trained."""
_STEPS_BETWEEN_CHECKS = 200
_BATCHES_WATCHED = 16
_SAMPLES_AT_START = 256


class StoppedEarlyError(ManyDGError):
    """Raised by a reporter between two epochs, to end a training whose result is no longer wanted."""


class Reporter(Protocol):
    """Is called back as a run proceeds: from the training loop, never inside a step.

    ``epoch_ended`` may raise :class:`StoppedEarlyError`, which ends the training and reaches the caller of :func:`fit`.
    """

    def started(self, algorithm: str, epochs: int, first_epoch: int) -> None: ...

    def epoch_ended(self, entry: EpochEntry) -> None: ...

    def finished(self, record: RunRecord) -> None: ...


class Silent:
    """A reporter that reports nothing."""

    def started(self, algorithm: str, epochs: int, first_epoch: int) -> None:
        pass

    def epoch_ended(self, entry: EpochEntry) -> None:
        pass

    def finished(self, record: RunRecord) -> None:
        pass


@dataclass(frozen=True)
class Fitted:
    """A trained algorithm and how it was trained.

    - ``algorithm``: With the weights of the epoch that was kept.
    - ``epoch``: The epoch whose weights were kept; 0 where there are no epochs.
    - ``selection_rule``: How that epoch was chosen.
    - ``speed``: The precision and execution that were used.
    - ``members``, ``members_rule``: What a model of several learners is made of, and why.
    - ``out_of_fold`` ``(samples, K)``: Probabilities of the validation patients, where something was fitted on them:
      each patient's by what was fitted on the others.
    """

    algorithm: Algorithm
    history: list[EpochEntry]
    epoch: int
    selection_rule: str
    speed: Speed = AS_WRITTEN
    members: tuple[MemberEntry, ...] = ()
    members_rule: str = ""
    out_of_fold: npt.NDArray[np.float32] | None = None


def fit(
    config: TrainingConfig,
    train: DomainDataset,
    val: DomainDataset | None,
    device: torch.device,
    *,
    backbone: nn.Module | None = None,
    folder: Path | None = None,
    reporter: Reporter | None = None,
) -> Fitted:
    """Train an algorithm; the epoch is chosen on validation patients, or is the last where there are none.

    - ``train``, ``val``: Training and validation patients; what is fitted to the inputs comes from the training
      patients alone.
    - ``backbone``: A module of the user's own instead of the configuration's.
    - ``folder``: Where the checkpoint is kept; an unfinished run in it is continued.
    """
    trust_named(config)
    reporter = reporter or Silent()
    target = target_of(train.target, config.loss)
    check_training_labels(target, train)
    target.fit(train.targets)
    if leak := lengths_tell(target, train):
        warnings.warn(f"{leak}. Cut recordings into sessions of one length before you prepare them", ManyDGWarning, 2)
    metric = selection_metric(config, target)
    untrained = copy.deepcopy(backbone)
    algorithm = _build(config, target, train, backbone)
    expect_compiling(config, algorithm, train, device)
    # Through the algorithm, because one that has no use for the backbone need not meet the backbone's requirements.
    algorithm.fit_inputs(train)
    if current_team() is not None:
        check_divisible(type(algorithm), sequential=algorithm.backbone.crop is not None)
    if algorithm.sampling == "whole":
        rounds = ScoredRounds(config.algorithm, target, val, metric, reporter)
        algorithm.fit_whole(train, config.seed, rounds)
        return Fitted(algorithm, [], 0, rounds.selection_rule)
    algorithm.to(device)
    placed = place(_with_domains(train, algorithm), algorithm, device)
    held_back = None if val is None else place(val, algorithm, device)
    start_algorithm(algorithm, placed, config.seed)
    loop = TrainingLoop(algorithm, placed, held_back, config, metric, folder, reporter)
    loop.run()
    fitted = Fitted(algorithm, loop.history, loop.best_epoch, loop.selection_rule, loop.speed)
    if not isinstance(algorithm, Best):
        return fitted
    return _with_others(algorithm, fitted, config, train, val, device, untrained, folder, reporter)


def _with_others(
    algorithm: Best,
    fitted: Fitted,
    config: TrainingConfig,
    train: DomainDataset,
    val: DomainDataset | None,
    device: torch.device,
    backbone: nn.Module | None,
    folder: Path | None,
    reporter: Reporter,
) -> Fitted:
    """Train the other candidates beside the first, and weigh all by the validation patients, or evenly without any.

    Where the plain network without context clearly loses to the one with it, nothing else is trained without context.
    """
    first, *others = candidates(InputSchema.of(train))
    trained: dict[str, Algorithm] = {first.label: algorithm}
    logits: dict[str, Tensor] = {} if val is None else {first.label: shared_logits(algorithm, val)}
    for candidate in others:
        if "context" not in candidate.options and val is not None and set(PLAIN) <= set(logits):
            plain = {label: logits[label] for label in PLAIN}
            if second_is_worse(algorithm.target, plain, val.targets.cpu(), val.domains.cpu(), config.seed):
                continue
        part = None if folder is None else folder / MEMBERS / candidate.label
        views = candidate.view(train), None if val is None else candidate.view(val)
        own, options = copy.deepcopy(backbone), candidate.configured(config, len(train))
        one = fit(options, *views, device, backbone=own, folder=part, reporter=reporter).algorithm.to(device)
        trained[candidate.label] = one
        if views[1] is not None:
            logits[candidate.label] = shared_logits(one, views[1])
    if val is None:
        even = 1 / len(trained)
        algorithm.join(even, [Member(trained[candidate.label], candidate, even) for candidate in others])
        return fitted
    return _weigh(algorithm, fitted, config, train, val, trained, logits)


def _weigh(
    algorithm: Best,
    fitted: Fitted,
    config: TrainingConfig,
    train: DomainDataset,
    val: DomainDataset,
    trained: Mapping[str, Algorithm],
    logits: Mapping[str, Tensor],
) -> Fitted:
    """Put the candidates that count beside the first, with weights by the validation patients."""
    target, metric = algorithm.target, selection_metric(config, algorithm.target)
    weighed = stack(target, logits, val.targets.cpu(), val.domains.cpu(), config.seed)
    members = tuple(
        MemberEntry(label, share, validation_metrics(target, val, target.probabilities(logits[label]).numpy(), metric))
        for label, share in zip(logits, weighed.shares, strict=True)
    )
    own, *others = zip(logits, weighed.weights.tolist(), weighed.counting, strict=True)
    joined = [Member(trained[label], Candidate.of(label), weight) for label, weight, counts in others if counts]
    algorithm.join(own[1], joined)
    out_of_fold, rule = weighed.out_of_fold, weighed.reason
    if ORDER in train.columns and target.exclusive:
        causal = is_causal(InputSchema.of(train))
        if chained := fit_chain(target, train, val, out_of_fold, config.seed, causal=causal):
            algorithm.chain = ClassChain(chained.chain, causal=causal).to(device_of(algorithm))
            out_of_fold, rule = chained.out_of_fold, f"{rule}; then a Markov chain of the classes in time"
    probabilities = target.probabilities(out_of_fold).float().numpy()
    return replace(fitted, members=members, members_rule=rule, out_of_fold=probabilities)


def _with_domains(train: DomainDataset, algorithm: Algorithm) -> DomainDataset:
    """The training set with the domains that the algorithm's batches are to have."""
    return replace(train, domains=algorithm.domains_of(train))


def start_algorithm(algorithm: Algorithm, train: DomainDataset, seed: int) -> None:
    """Let an algorithm see a few training samples before its first step (:meth:`Algorithm.start`)."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    crops = crops_of(train, algorithm.backbone)
    if crops is not None:
        order = plan_epoch("samples", train.domains, _SAMPLES_AT_START, seed, 0, crops=crops).indices
    rows, device = order[:_SAMPLES_AT_START].to(train.device), device_of(algorithm)
    buffers = {name: buffer.clone() for name, buffer in algorithm.named_buffers()}
    algorithm.train()
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        algorithm.start(train.take(rows).to(device).inputs)
        for name, buffer in algorithm.named_buffers():
            buffer.copy_(buffers[name])


def fit_further(
    fitted: Fitted, config: TrainingConfig, train: DomainDataset, val: DomainDataset, device: torch.device
) -> Fitted:
    """Go on training an algorithm on other samples, whose patients have the codes it was built for.

    What was fitted to the inputs stays as it is; optimisers start anew, and the epoch is chosen on validation patients.
    """
    algorithm = fitted.algorithm
    if isinstance(algorithm, Best):
        raise ConfigError("best cannot learn from further patients: train its candidates by themselves, such as ema")
    metric = selection_metric(config, algorithm.target)
    placed, held_back = place(_with_domains(train, algorithm), algorithm, device), place(val, algorithm, device)
    loop = TrainingLoop(algorithm, placed, held_back, config, metric, None, Silent())
    loop.run()
    return Fitted(algorithm, fitted.history + loop.history, loop.best_epoch, loop.selection_rule, loop.speed)


def trust_named(config: TrainingConfig) -> None:
    """Import the classes outside the registries that a configuration of the caller names; never for one of a file."""
    ALGORITHMS.trust(config.algorithm)
    BACKBONES.trust(config.backbone)


def _build(config: TrainingConfig, target: Target, train: DomainDataset, module: nn.Module | None) -> Algorithm:
    torch.manual_seed(config.seed * 1_000_003)
    with refusing_what_does_not_fit():
        backbone = backbone_of(config, InputSchema.of(train), module)
    cls = ALGORITHMS.get(config.algorithm)
    if reason := cls.lacks():
        raise ConfigError(f"{config.algorithm} cannot be trained here: {reason}")
    return cls(backbone, target, train.n_patients, cls.settings_from(config.settings))


def selection_metric(config: TrainingConfig, target: Target) -> str:
    """The validation metric that chooses the epoch."""
    metric = config.selection or target.selection
    if metric not in target.metrics:
        raise unknown_name("selection metric", metric, target.metrics)
    return metric


def check_training_labels(target: Target, train: DomainDataset) -> None:
    """Raise if there is nothing to learn from the training patients."""
    if len(train) < 2:
        raise DataError(f"training needs at least two samples; the training patients have {len(train)}")
    truth = target.truth(train.targets)
    same = bool((truth == truth[0]).all())
    if target.numeric and same:
        raise DataError(
            f"all {len(train)} samples of the {train.n_patients} training patients have the value {float(truth[0]):g}: "
            "there is nothing to learn; use another seed or more patients"
        )
    if target.exclusive and same:
        raise DataError(
            f"all {len(train)} samples of the {train.n_patients} training patients are of one class "
            f"('{target.spec.names[int(truth[0])]}'): there is nothing to learn; use another seed or more patients"
        )


class ScoredRounds(Rounds):
    """Keeps the number of rounds with the highest validation metric, or all without validation patients.

    - ``algorithm``: Its name.
    - ``reporter``: Gets an entry for every number of rounds that is scored.
    """

    def __init__(
        self, algorithm: str, target: Target, val: DomainDataset | None, metric: str, reporter: Reporter
    ) -> None:
        self.algorithm, self.target, self.val, self.metric, self.reporter = algorithm, target, val, metric, reporter
        self.selection_rule = "trained once on the training patients"
        self._best: tuple[int, float | None] = (0, None)
        self._since = time.perf_counter()

    def started(self, total: int) -> None:
        self.reporter.started(self.algorithm, total, 1)
        self._since = time.perf_counter()

    def ended(self, number: int, losses: Mapping[str, float], logits: Tensor) -> None:
        trained = time.perf_counter()
        val: dict[str, float | None] = {}
        if self.val is not None:
            val = validation_metrics(self.target, self.val, self.target.probabilities(logits).numpy(), self.metric)
            if not self._best[0] or _better(self.metric, val[self.metric], self._best[1]):
                self._best = number, val[self.metric]
        self.reporter.epoch_ended(EpochEntry(number, losses, val, trained - self._since))
        self._since = time.perf_counter()

    def kept(self, total: int) -> int:
        best, _ = self._best
        if not best:
            self.selection_rule = f"all {total} rounds: no patients were held back to choose a number"
            return total
        self.selection_rule = f"number of rounds with the {_best_of(self.metric)}"
        return best


def validation_metrics(
    target: Target, data: DomainDataset, probabilities: npt.NDArray[np.floating[Any]], metric: str
) -> dict[str, float | None]:
    """Metrics on validation patients; raises where the one to choose by is undefined.

    Of one class kappa is 0 or undefined whatever the model predicts, so that it chooses nothing.
    """
    truth = target.truth(data.targets).cpu().numpy()
    threshold, _ = choose_threshold(target, truth, probabilities)
    metrics = {name: _or_none(value) for name, value in score(target, truth, probabilities, threshold).items()}
    if metrics.get(metric) is None or (metric == "kappa" and (truth == truth[0]).all()):
        raise DataError(
            f"the validation {metric} is undefined: too few {'values' if target.numeric else 'classes'} are to be seen "
            f"in {data.n_patients} validation patient(s). Take another seed, or more of them, as with "
            "ratios=(0.6, 0.2, 0.2) (--set training.ratios=[0.6,0.2,0.2])"
        )
    return metrics


class TrainingLoop:
    """Trains one algorithm and leaves the weights of its best epoch in it, or of its last without validation patients.

    - ``algorithm``: On the device to train on.
    - ``train``, ``val``: Training and validation patients; ``None`` where too few are there to hold any back.
    - ``metric``: Validation metric that chooses the epoch.
    - ``folder``: Where the checkpoint is kept; an unfinished run in it is continued.
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
        self.execution = Execution(config, algorithm, train, self.optimizers, device_of(algorithm))
        self.orders = EpochOrders(algorithm, train, config)
        self.history: list[EpochEntry] = []
        self.best_epoch = 0
        self.best: dict[str, Tensor] = {}

    def run(self) -> None:
        """Train to the end, from the checkpoint if there is one."""
        if self.checkpoint is not None and self.checkpoint.exists():
            self._resume(self.checkpoint)
        done = len(self.history)
        self.reporter.started(self.config.algorithm, self.config.epochs, done + 1)
        with self.execution.running(), ThreadPoolExecutor(max_workers=1) as worker:
            for epoch in range(done + 1, self.config.epochs + 1):
                self._run_epoch(epoch, worker)
        self.algorithm.load_state_dict(self.best)

    @property
    def speed(self) -> Speed:
        """The precision and execution of the steps."""
        return self.execution.speed

    @property
    def selection_rule(self) -> str:
        """How the epoch was chosen whose weights are kept."""
        if self.val is None:
            return "last epoch: no patients were held back to choose one"
        return f"epoch with the {_best_of(self.metric)}"

    def _run_epoch(self, epoch: int, worker: Executor) -> None:
        start = time.perf_counter()
        torch.manual_seed(self.config.seed * 1_000_003 + epoch)
        order = self.orders.of(epoch, worker)
        self.algorithm.train()
        with self.execution.in_precision():
            losses = self._run_steps(order, epoch)
        self.algorithm.epoch_ended(self.train)
        trained = time.perf_counter()
        val = {} if self.val is None else self._validate(self.val, epoch, len(order.plan))
        watched = None if self.val is None else self._watch(self.val)
        entry = EpochEntry(epoch, losses, val, trained - start, self._describe(order), watched or None)
        self.history.append(entry)
        if self._is_best(val):
            self.best_epoch = epoch
            self.best = {name: tensor.detach().clone() for name, tensor in self.algorithm.state_dict().items()}
        if self.checkpoint is not None:
            by_leader(partial(self._save, self.checkpoint))
        self.reporter.epoch_ended(entry)

    def _describe(self, order: EpochOrder) -> str | None:
        if order.windows is None:
            return None
        return f"windows of about {self.orders.rows_of_window} rows on disk, {len(order.windows.windows)} of them"

    def _is_best(self, val: Mapping[str, float | None]) -> bool:
        if self.val is None or self.best_epoch == 0:
            return True
        return _better(self.metric, val[self.metric], self.history[self.best_epoch - 1].val[self.metric])

    def _run_steps(self, order: EpochOrder, epoch: int) -> dict[str, float]:
        """All steps of an epoch; the loss terms are read in blocks, on a GPU once, so that nothing waits for it."""
        plan = order.plan
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        block: list[Terms] = []
        size = _STEPS_BETWEEN_CHECKS if device_of(self.algorithm).type == "cpu" else len(plan)
        for step, do_step in enumerate(self.execution.steps(order)):
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
            (number, name)
            for name, column in values.items()
            for number, value in enumerate(column)
            if value is not None and not math.isfinite(value)
        ]
        if not bad:
            return
        number, name = min(bad)
        step = first_step + number
        rows = plan.indices[plan.bounds[step] : plan.bounds[step + 1]]
        patients = len(torch.unique(self.train.domains.cpu()[rows]))
        raise TrainingError(
            f"the loss term '{name}' is {values[name][number]} at step {step + 1} of epoch {epoch} "
            f"(a batch of {len(rows)} samples of {patients} patients, first rows {rows[:5].tolist()} of the training "
            f"set); {self._kept()}. Try a smaller learning rate than {self.config.lr:g}, or look at those samples"
        )

    def _kept(self) -> str:
        if not self.history:
            return "no epoch was finished"
        where = "" if self.checkpoint is None else f" in {self.checkpoint}"
        return f"epoch {len(self.history)} is kept{where}"

    def _validate(self, data: DomainDataset, epoch: int, steps: int) -> dict[str, float | None]:
        probabilities = shared_probabilities(self.algorithm, data).numpy()
        bad = int((~np.isfinite(probabilities)).any(axis=1).sum())
        if bad:
            raise TrainingError(
                f"after step {steps}, the last of epoch {epoch}, the predictions for {bad} of {len(data)} validation "
                f"samples are not finite; {self._kept()}. Try a smaller learning rate than {self.config.lr:g}"
            )
        return validation_metrics(self.algorithm.target, data, probabilities, self.metric)

    def _watch(self, data: DomainDataset) -> dict[str, float | None]:
        """The algorithm's watched terms on pairs of validation samples, the same pairs after every epoch."""
        crops, size = crops_of(data, self.algorithm.backbone), self.config.batch_size
        plan = plan_epoch("pairs", data.domains, size, self.config.seed, 0, crops=crops).to(data.device)
        batches: list[Terms] = []
        self.algorithm.eval()
        with torch.inference_mode():
            for indices, pairs in itertools.islice(plan, _BATCHES_WATCHED):
                terms = self.algorithm.watched(data.take(indices, pairs).to(device_of(self.algorithm)))
                if not terms:
                    return {}
                batches.append(Terms.of(terms))
        known = {name: [value for value in column if value is not None] for name, column in read_terms(batches).items()}
        return {name: _or_none(sum(values) / len(values)) for name, values in known.items()}

    def _save(self, path: Path) -> None:
        tensors = {f"model/{name}": tensor for name, tensor in self.algorithm.state_dict().items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        history = [entry.to_json() for entry in self.history]
        states: dict[str, Json] = {}
        for name, optimizer in self.optimizers.items():
            packed, states[name] = pack_optimizer(name, optimizer)
            tensors |= {f"optimizer/{key}": tensor for key, tensor in packed.items()}
        write_tensors(path, tensors, {"history": history, "best_epoch": self.best_epoch, "optimizers": states})

    def _resume(self, path: Path) -> None:
        tensors, meta = read_tensors(path)
        device = device_of(self.algorithm)
        states = _under("optimizer/", tensors)
        try:
            self.algorithm.load_state_dict(_under("model/", tensors))
            self.best = same_device(_under("best/", tensors), device)
            for name, optimizer in self.optimizers.items():
                unpack_optimizer(name, optimizer, states, meta["optimizers"][name])
            self.history = [EpochEntry.from_json(entry) for entry in meta["history"]]
            self.best_epoch = meta["best_epoch"]
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise StorageError(f"{path} does not fit this run: delete it and run the same command again") from error


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _better(metric: str, new: float | None, old: float | None) -> bool:
    return new is not None and (old is None or oriented(metric, new) > oriented(metric, old))


def _best_of(metric: str) -> str:
    return f"{'highest' if oriented(metric, 1.0) > 0 else 'lowest'} validation {metric}"


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
