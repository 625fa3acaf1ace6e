"""A trained algorithm: rebuilt from its weights, run over a dataset with its context, and how far to trust that."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from manydg.algorithms import ALGORITHMS, Algorithm
from manydg.algorithms.best import Best, Candidate, Member
from manydg.backbones import Backbone, as_backbone, auto_backbone, build_backbone
from manydg.backbones._sequences import ClassChain, SequenceBackbone
from manydg.config import NO_SEQUENCE, TrainingConfig
from manydg.data.columns import unnest
from manydg.data.context import (
    add_order,
    apply_context,
    estimate_strength,
    fitting_parts,
    has_context,
    has_signals,
    unsupported,
)
from manydg.data.dataset import Batch, DomainDataset, InputSchema
from manydg.data.timeline import CHAIN, ORDER, PAUSE, ContextOptions, SequenceOptions
from manydg.errors import ConfigError, DataError, ManyDGWarning, StorageError
from manydg.evaluation.metrics import Predictions
from manydg.evaluation.trust import (
    EmbeddingSums,
    Reference,
    SetRule,
    fit_for_most_patients,
    fit_on_average,
    fit_reference,
    fit_temperature,
    novelty_threshold,
)
from manydg.files import Json, fingerprint
from manydg.targets import Target, target_of
from manydg.training.record import read_tensors, write_tensors

MAX_ROWS = 4096
_FEWEST_IN_ORDER = 5
"""Samples of a patient, on average, from which on reading them in order makes sense."""
_SESSIONS_TO_JUDGE, _TELLING = 5, 0.45
_MOST_BUFFER_BYTES = 1 << 28
_MAX_VALUES = {"cpu": 1 << 20, "cuda": 1 << 24}


# A trained algorithm from its file


def rebuild(
    config: TrainingConfig,
    schema: InputSchema,
    target: Target,
    n_domains: int,
    tensors: Mapping[str, Tensor],
    *,
    backbone: nn.Module | None = None,
    source: Path,
) -> Algorithm:
    """A trained algorithm from its saved weights, ready to predict.

    - ``source``: Where the weights come from, for the message if they do not fit.
    """
    try:
        with _limited_parameters(2 * len(tensors) + 100, source):
            if backbone is None:
                with suppress(RuntimeError, ConfigError), torch.device("meta"):
                    # Without memory first, since a file can say that its model is larger than any machine. A module of
                    # another package may not be made for that.
                    _check_size(_assemble(config, schema, target, n_domains, tensors, None), tensors)
            algorithm = _assemble(config, schema, target, n_domains, tensors, backbone)
        algorithm.load_state_dict(tensors)
    except (RuntimeError, TypeError, ValueError, KeyError, ArithmeticError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise StorageError(
            f"{source} does not fit the model it says it is of ({reason}): open it with the backbone and the version "
            "of the program that it was trained with"
        ) from error
    return algorithm.eval()


def _assemble(
    config: TrainingConfig,
    schema: InputSchema,
    target: Target,
    n_domains: int,
    tensors: Mapping[str, Tensor],
    module: nn.Module | None,
) -> Algorithm:
    """An algorithm with the shapes of the weights in a file; of several learners, for those that the file has."""
    cls, untrained = ALGORITHMS.get(config.algorithm), copy.deepcopy(module)
    algorithm = cls(backbone_of(config, schema, module), target, n_domains, cls.settings_from(config.settings))
    if isinstance(algorithm, Best):
        others = []
        for label in dict.fromkeys(name.split(".")[1] for name in tensors if name.startswith("others.")):
            candidate = Candidate.of(label)
            inner = candidate.configured(config), candidate.schema(schema)
            inside = _assemble(*inner, target, n_domains, {}, copy.deepcopy(untrained))
            others.append(Member(inside, candidate, 1.0))
        algorithm.join(1.0, others)
        if "chain.transitions" in tensors:
            algorithm.chain = ClassChain.empty(target.size, causal=is_causal(schema))
    return algorithm


@contextmanager
def _limited_parameters(limit: int, source: Path) -> Iterator[None]:
    """Raise once modules have registered more parameters within the block: each layer that a file asks for takes time
    and memory, even one without weights."""
    count = itertools.count(1)

    def registered(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if next(count) > limit:
            raise StorageError(f"{source} describes a model of more layers than it has weights for: train it again")

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


def _check_size(planned: Algorithm, tensors: Mapping[str, Tensor]) -> None:
    """Raise a plain error if a model, built without memory, has not the weights of a file or takes far more than it."""
    for name, weight in planned.named_parameters():
        if isinstance(weight, nn.UninitializedParameter):
            continue
        if name not in tensors or tensors[name].shape != weight.shape:
            raise ValueError(f"'{name}' is of another shape")
    # Buffers that are computed when the model is built are not in the file.
    known = sum(tensor.nbytes for tensor in tensors.values())
    if sum(buffer.nbytes for buffer in planned.buffers() if not is_lazy(buffer)) > 2 * known + _MOST_BUFFER_BYTES:
        raise ValueError("it would take far more memory than its weights")


def backbone_of(config: TrainingConfig, schema: InputSchema, module: nn.Module | None) -> Backbone:
    """The backbone of a configuration, or the user's own module as one; around it, what reads samples in order."""
    known = schema.settings.get("sequence")
    if isinstance(known, Mapping):
        without = {name: value for name, value in schema.settings.items() if name != "sequence"}
        columns = {name: column for name, column in schema.columns.items() if name not in (ORDER, PAUSE)}
        inner = backbone_of(config, dataclasses.replace(schema, columns=columns, settings=without), module)
        return SequenceBackbone(inner, SequenceOptions.from_json(known))
    if module is not None:
        return as_backbone(module, schema)
    return _named_backbone(config, schema)


def _named_backbone(config: TrainingConfig, schema: InputSchema) -> Backbone:
    name = auto_backbone(schema) if config.backbone == AUTO else config.backbone
    return build_backbone(name, schema, config.backbone_options)


def is_causal(schema: InputSchema) -> bool:
    """Whether samples are read in order up to each one alone."""
    sequence = schema.settings.get("sequence")
    return isinstance(sequence, Mapping) and sequence["direction"] == "causal"


# Its predictions


def batches(dataset: DomainDataset, device: torch.device) -> Iterator[Batch]:
    """The dataset in order, in pieces that fit in memory, on a device."""
    rows = _batch_rows(dataset, device)
    for start in range(0, len(dataset), rows):
        index = torch.arange(start, min(start + rows, len(dataset)), device=dataset.device)
        yield dataset.take(index).to(device)


def refuse_infinite(dataset: DomainDataset) -> None:
    """Raise if an input is infinite, as no prepared dataset holds it."""
    start = 0
    for batch in batches(dataset, dataset.device):
        for name, column in batch.inputs.items():
            levels, items = unnest(column)
            if not items.is_floating_point() or not bool((bad := torch.isinf(items)).any()):
                continue
            row = int(torch.nonzero(bad)[0, 0])
            for offsets in reversed(levels):
                row = int(torch.searchsorted(offsets, row, right=True)) - 1
            raise DataError(
                f"input '{name}' is infinite, or too large for float32, in row {start + row} (the first row is 0): "
                "replace it"
            )
        start += len(batch)


def whole_patients(dataset: DomainDataset) -> list[Tensor]:
    """Positions of the samples in pieces that fit in memory and hold all samples of each of their patients."""
    order = _in_order(dataset)
    if order is None:
        order = torch.argsort(dataset.domains, stable=True)
    return _pieces(order, torch.diff(dataset.domains[order]) != 0, _batch_rows(dataset, dataset.device))


def whole_sessions(dataset: DomainDataset, device: torch.device) -> list[Tensor]:
    """Positions of the samples in pieces that hold whole sessions, in the order that a sequence model reads them in.

    Without such an order, every sample is a session of its own. Pieces are of a size for a device.
    """
    order, rows = _in_order(dataset), _batch_rows(dataset, device)
    if order is None:
        return list(torch.split(torch.arange(len(dataset), device=dataset.device), rows))
    return _pieces(order, torch.diff(_numbers(dataset)[order]) != 1, rows)


def _in_order(dataset: DomainDataset) -> Tensor | None:
    """Positions of the samples by patient and time, where the dataset has an order to read them in."""
    return torch.argsort(_numbers(dataset)) if ORDER in dataset.columns else None


def _numbers(dataset: DomainDataset) -> Tensor:
    return cast("Tensor", dataset.column(ORDER))


def _pieces(order: Tensor, differs: Tensor, rows: int) -> list[Tensor]:
    """Cut an order into pieces of whole groups; groups that begin within the same block of rows go together.

    - ``order`` ``(samples,)``
    - ``differs`` ``(samples - 1,)``: Where a sample is of another group than the one before it.
    - ``rows``: Of a block: a piece is longer than that by one group at most.
    """
    begins = torch.cat([differs.new_ones(min(1, len(order))), differs])
    starts = torch.nonzero(begins).squeeze(1)
    piece = (starts // rows)[torch.cumsum(begins, 0) - 1]
    _, sizes = torch.unique_consecutive(piece, return_counts=True)
    return list(torch.split(order, sizes.tolist()))


def predict_probabilities(algorithm: Algorithm, dataset: DomainDataset) -> Tensor:
    """Probabilities of every sample, ``(samples, K)``, on the CPU.

    An algorithm that uses a patient's other samples gets all samples of the patient in the dataset. Where a logit of a
    sample is not finite, all its probabilities are NaN: a sigmoid would make certainty of an overflow.
    """
    with torch.inference_mode():
        return finite_probabilities(algorithm.target, predict_logits(algorithm, dataset))


def predict_logits(algorithm: Algorithm, dataset: DomainDataset) -> Tensor:
    """Logits of every sample, ``(samples, K)``, on the CPU."""
    algorithm.eval()
    predict = _predict_patients if algorithm.uses_patients else _predict_samples
    with torch.inference_mode():
        return predict(algorithm, dataset)


def finite_probabilities(target: Target, logits: Tensor) -> Tensor:
    """Probabilities ``(rows, K)``, NaN in every row with a logit that is not finite."""
    finite = torch.isfinite(logits).all(dim=1, keepdim=True)
    return torch.where(finite, target.probabilities(logits), torch.nan)


def _predict_samples(algorithm: Algorithm, dataset: DomainDataset) -> Tensor:
    device = device_of(algorithm)
    pieces = whole_sessions(dataset, device)
    logits = [algorithm.predict(dataset.take(rows).to(device).inputs).float().cpu() for rows in pieces]
    return _as_ordered(logits, pieces)


def _predict_patients(algorithm: Algorithm, dataset: DomainDataset) -> Tensor:
    pieces, device = whole_patients(dataset), device_of(algorithm)
    logits = []
    for rows in pieces:
        batch = dataset.take(rows).to(device)
        logits.append(algorithm.predict_patients(batch.inputs, batch.domains).float().cpu())
    return _as_ordered(logits, pieces)


def _as_ordered(parts: list[Tensor], pieces: list[Tensor]) -> Tensor:
    """Rows that were computed piece by piece, in the order of the dataset."""
    joined = torch.cat(parts)
    return torch.empty_like(joined).index_copy_(0, torch.cat(pieces).cpu(), joined)


def embed_dataset(algorithm: Algorithm, dataset: DomainDataset) -> dict[str, Tensor]:
    """The algorithm's embeddings of every sample, by name, ``(samples, dim)`` each, on the CPU."""
    algorithm.eval()
    device = device_of(algorithm)
    pieces = whole_sessions(dataset, device)
    with torch.inference_mode():
        parts = [algorithm.embed(dataset.take(rows).to(device).inputs) for rows in pieces]
    return {name: _as_ordered([part[name].float().cpu() for part in parts], pieces) for name in parts[0]}


def device_of(algorithm: Algorithm) -> torch.device:
    """The device of the algorithm's weights; trees have buffers alone."""
    tensor = next(itertools.chain(algorithm.parameters(), algorithm.buffers()), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def _batch_rows(dataset: DomainDataset, device: torch.device) -> int:
    """The number of rows that hold about a million values (more on a GPU), at least 16."""
    values = 1
    for column in dataset.columns.values():
        _, items = unnest(column)
        values += items.numel() // max(len(column), 1)
    return max(16, min(MAX_ROWS, _MAX_VALUES[device.type] // values))


NONE, AUTO, CAUSAL = "none", "auto", "causal"


def context_mode(config: TrainingConfig, dataset: DomainDataset) -> str:
    """``none``, ``offline`` or ``causal``.

    With ``auto`` it is what the algorithm is made for, where the inputs allow it.
    """
    if reason := contradiction(config.algorithm, config):
        what = "causal context" if config.sequence == NO_SEQUENCE else f"the sequence {config.sequence}"
        raise ConfigError(f"{config.algorithm} cannot be used with {what}: {reason}")
    event = dataset.info.event
    if event is not None and (reason := looks_ahead(config, dataset)):
        raise ConfigError(f"{config.algorithm} cannot foresee '{event.name}': {reason}")
    if config.context != AUTO:
        return config.context
    preferred = ALGORITHMS.get(config.algorithm).context
    if preferred == NONE or has_context(dataset) or unsupported(dataset, preferred):
        return NONE
    return CAUSAL if event is not None and event.foresee else preferred


def sequence_options(config: TrainingConfig) -> SequenceOptions | None:
    """How samples are read in order, if at all; a sequence looks where the context does, unless it says otherwise."""
    if config.sequence == NO_SEQUENCE:
        return None
    direction = CAUSAL if config.context == CAUSAL else "offline"
    return SequenceOptions.from_mapping(config.sequence, {"direction": direction, **config.sequence_options})


def contradiction(algorithm: str, config: TrainingConfig) -> str | None:
    """The reason why an algorithm makes no sense with the context and the sequence of a configuration."""
    cls, sequence = ALGORITHMS.get(algorithm), sequence_options(config)
    direction = config.context if sequence is None else sequence.direction
    if cls.uses_patients and CAUSAL in (config.context, direction):
        return "it adapts to all samples of a patient when it predicts, to later ones too; take 'offline' or 'none'"
    if sequence is None:
        return None
    if sequence.kind == CHAIN and not issubclass(cls, Best):
        return "a chain of the classes is part of best"
    if cls.sampling == "whole":
        return "it reads each sample by itself and has no use for a sequence"
    context = cls.context if config.context == AUTO else config.context
    if {context, direction} == {"offline", CAUSAL}:
        return f"its context is {context} and its sequence {direction}: let both be the same"
    return None


def settled(config: TrainingConfig, dataset: DomainDataset) -> TrainingConfig:
    """The configuration with what ``best`` leaves to the data: its context, and whether samples are read in order.

    Measurements with times are most often predicted as they come in: their context is causal unless the configuration
    says otherwise. That of signals, which are scored once the recording is there, is offline. A sequence makes sense
    where patients have several samples with times; without context (``none``) no other sample is looked at at all.
    """
    if not issubclass(ALGORITHMS.get(config.algorithm), Best):
        return config
    context, sequence = config.context, config.sequence
    if context == AUTO:
        context = CAUSAL if dataset.times is not None and not has_signals(dataset) else "offline"
        if has_context(dataset) or unsupported(dataset, context):
            context = NONE
    enough = dataset.times is not None and len(dataset) >= _FEWEST_IN_ORDER * dataset.n_patients
    if sequence == NO_SEQUENCE and enough and config.context != NONE:
        sequence = "gru"
    return config.replace(context=context, sequence=sequence)


def looks_ahead(config: TrainingConfig, dataset: DomainDataset) -> str | None:
    """The reason why a configuration would show samples after an event's onset to a model that is to foresee it."""
    if dataset.info.event is None or not dataset.info.event.foresee:
        return None
    if ALGORITHMS.get(config.algorithm).uses_patients:
        return "it adapts to all samples of a patient when it predicts, to those after the onset too"
    sequence = sequence_options(config)
    if config.context == "offline" or (sequence is not None and sequence.direction != CAUSAL):
        return "offline context or sequence looks at samples after the onset; say --context causal"
    return None


class ContextCache:
    """The last dataset with context, for runs one after the other on the same samples: a study's on one split.

    - ``spared``: Seconds that the last request did not take because another run had made the context: a run's own
      seconds include them, so that the first run of a split is not the only one that is charged.
    """

    def __init__(self) -> None:
        self.spared = 0.0
        self._key = ""
        self._made: tuple[DomainDataset, DomainDataset, float] | None = None

    def get(
        self,
        dataset: DomainDataset,
        config: TrainingConfig,
        device: torch.device,
        backbone: nn.Module | None,
        training: npt.NDArray[np.int64] | None,
        make: Callable[[], DomainDataset],
    ) -> DomainDataset:
        """The dataset with the context of a configuration, made unless it is the one that was made last."""
        self.spared, mode = 0.0, context_mode(config, dataset)
        if mode == NONE or backbone is not None:
            return make()
        spectrum = (config.backbone, config.backbone_options) if has_signals(dataset) else None
        # Columns are known by their identity; the dataset that is kept beside them holds on to them.
        same = [id(dataset.info), *(id(column) for _, column in sorted(dataset.columns.items()))]
        key = fingerprint(mode, config.context_options, spectrum, str(device), same, _digest(dataset, training))
        if self._made is None or key != self._key:
            self._key, self._made = "", None
            start = time.perf_counter()
            data = make()
            # Without a context, because the network has no spectrograms, there is nothing to share.
            if data is not dataset:
                self._key, self._made = key, (dataset, data, time.perf_counter() - start)
            return data
        _, data, self.spared = self._made
        return data


def _digest(dataset: DomainDataset, training: npt.NDArray[np.int64] | None) -> str:
    """A hash of which rows there are, whose, when, and which of them are training patients'."""
    digest = hashlib.blake2b(digest_size=8)
    chosen = None if training is None else torch.from_numpy(training)
    for values in (dataset.rows, dataset.domains, dataset.times, chosen):
        digest.update(b"none" if values is None else values.cpu().contiguous().numpy().tobytes() + b"|")
    return digest.hexdigest()


_cache: ContextVar[ContextCache | None] = ContextVar("context_cache", default=None)


@contextmanager
def sharing_context(cache: ContextCache) -> Iterator[None]:
    """Trainings within the block take the context that others before them have made, where it is the same."""
    token = _cache.set(cache)
    try:
        yield
    finally:
        _cache.reset(token)


def spared_seconds() -> float:
    """What the context of the last request would have taken had it not been there; 0 outside of a shared block."""
    cache = _cache.get()
    return 0.0 if cache is None else cache.spared


def with_context(
    dataset: DomainDataset,
    config: TrainingConfig,
    device: torch.device,
    backbone: nn.Module | None = None,
    training: npt.NDArray[np.int64] | None = None,
) -> DomainDataset:
    """The dataset with the context and the order of a configuration; context is computed on the GPU where it fits.

    - ``training``: Rows of the training patients, from which the strength of context and the usual pause between
      samples are estimated where the configuration does not give them; by default all rows.
    - ``backbone``: The network whose spectrograms the context of signals is made of; by default the configuration's.
    """
    chosen, cache = settled(config, dataset), _cache.get()

    def made() -> DomainDataset:
        return _with_columns(dataset, config, device, backbone, training)

    data = made() if cache is None else cache.get(dataset, chosen, device, backbone, training, made)
    sequence = sequence_options(chosen)
    if sequence is None:
        return data
    ordered = add_order(data, sequence, None if training is None else torch.from_numpy(training))
    if config.sequence != NO_SEQUENCE:
        return ordered
    leak = lengths_tell(target_of(dataset.target), ordered if training is None else ordered.select(training))
    if leak is None:
        return ordered
    warnings.warn(f"{leak}. best leaves sequence models out", ManyDGWarning, stacklevel=2)
    known = cast("Mapping[str, Json]", ordered.info.settings["sequence"])
    settings = {**ordered.info.settings, "sequence": {**known, "kind": CHAIN}}
    return dataclasses.replace(ordered, info=dataclasses.replace(ordered.info, settings=settings))


def lengths_tell(target: Target, train: DomainDataset) -> str | None:
    """Say so where the length of a training session tells its class: a model that reads sessions could simply count."""
    sequence = train.info.settings.get("sequence")
    if not isinstance(sequence, Mapping) or sequence["kind"] == CHAIN or not target.exclusive:
        return None
    order = cast("Tensor", train.column(ORDER)).cpu().numpy()
    rows = np.argsort(order)
    session = np.cumsum(np.diff(order[rows], prepend=-1) != 1) - 1
    classes = np.zeros((session[-1] + 1, target.size))
    np.add.at(classes, (session, target.truth(train.targets).cpu().numpy()[rows]), 1)
    lengths, commonest = classes.sum(axis=1), classes.argmax(axis=1)
    for code, name in enumerate(target.spec.names):
        own, others = np.sort(lengths[commonest == code]), np.sort(lengths[commonest != code])
        if min(len(own), len(others)) < _SESSIONS_TO_JUDGE:
            continue
        below = (np.searchsorted(others, own) + np.searchsorted(others, own, side="right")) / 2
        if abs(float(below.mean()) / len(others) - 0.5) > _TELLING:
            return (
                f"training sessions of mostly '{name}' have {np.median(own):g} samples, others {np.median(others):g} "
                "(medians): a sequence model can tell the class by counting, which is worth nothing on sessions of "
                "other lengths"
            )
    return None


def _with_columns(
    dataset: DomainDataset,
    config: TrainingConfig,
    device: torch.device,
    backbone: nn.Module | None,
    training: npt.NDArray[np.int64] | None,
) -> DomainDataset:
    """The dataset with the columns of its context alone."""
    mode = context_mode(settled(config, dataset), dataset)
    if mode == NONE:
        return dataset
    spectrum = None
    if has_signals(dataset):
        spectrum = getattr(backbone or _named_backbone(config, InputSchema.of(dataset)), "spectrogram", None)
        if spectrum is None and config.context == AUTO:
            return dataset
    data = dataset
    if device.type == "cuda" and spectrum is None:
        needed = 40 * sum(column.nbytes for column in dataset.columns.values() if isinstance(column, torch.Tensor))
        data = dataset.to(device) if needed < torch.cuda.mem_get_info(device)[0] else dataset
    options = ContextOptions.from_mapping(mode, config.context_options)
    known = data if training is None else data.select(training)
    if options.strength is None:
        options = dataclasses.replace(options, strength=estimate_strength(known, spectrum))
    if options.parts is None and data.times is not None:
        options = dataclasses.replace(options, parts=fitting_parts(known, mode))
    return apply_context(data, options, spectrum)


def as_trained(dataset: DomainDataset, schema: InputSchema, backbone: nn.Module | None = None) -> DomainDataset:
    """A dataset with the same context and order as the training data of a model with this schema and backbone."""
    context, sequence = schema.settings.get("context"), schema.settings.get("sequence")
    if isinstance(context, Mapping) and not has_context(dataset):
        dataset = apply_context(dataset, ContextOptions.from_json(context), getattr(backbone, "spectrogram", None))
    if isinstance(sequence, Mapping) and ORDER not in dataset.columns:
        dataset = add_order(dataset, SequenceOptions.from_json(sequence))
    return dataset


# How far to trust a run's later predictions: temperature, prediction sets, and who is like its training patients.
#
# Everything is fitted on validation patients, or for the reference of embeddings on training patients; it is kept
# beside the model in ``calibration.safetensors``, a few small arrays in which no patient can be recognised.


CALIBRATION = "calibration.safetensors"
SAMPLES_OF_A_PATIENT, MOST_SAMPLES = 200, 50_000


@dataclass(frozen=True, eq=False)
class Calibration:
    """How far to trust the predictions of a run.

    - ``temperature``: What logits are divided by to make probabilities mean what they say.
    - ``on_average``, ``for_most``: Rules of prediction sets, of the probabilities as the model gives them.
    - ``reference``: Distribution of the training patients' mean embeddings; ``None`` with fewer than two patients.
    - ``limit``: Distance from which a patient is unlike those of the training.
    - ``false_alarms``: Probability, at most, that a patient of the same population is called so.
    - ``patients``: Number of validation patients it comes from.
    """

    temperature: float
    on_average: SetRule
    for_most: SetRule
    reference: Reference | None
    limit: float
    false_alarms: float
    patients: int


def fit_calibration(algorithm: Algorithm, sides: Mapping[str, DomainDataset], val: Predictions) -> Calibration:
    """Learn from the validation patients how far predictions can be trusted; test patients are not looked at."""
    truth, probabilities = val.truth, val.probabilities
    reference, limit, false_alarms = None, np.inf, 0.0
    if sides["train"].n_patients > 1:
        reference = fit_reference(*patient_embeddings(algorithm, sides["train"]))
        _, distances = reference.distances(*patient_embeddings(algorithm, sides["val"]))
        limit, false_alarms = novelty_threshold(distances)
    return Calibration(
        fit_temperature(val.target, truth, probabilities),
        fit_on_average(val.target, truth, probabilities, val.groups),
        fit_for_most_patients(val.target, truth, probabilities, val.groups),
        reference,
        limit,
        false_alarms,
        sides["val"].n_patients,
    )


def patient_embeddings(
    algorithm: Algorithm, dataset: DomainDataset
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Embeddings of samples spread evenly over each patient's time, at most two hundred of each, and their patients."""
    domains = dataset.domains.cpu().numpy()
    times = np.zeros(len(domains)) if dataset.times is None else dataset.times.cpu().numpy()
    each = max(1, min(SAMPLES_OF_A_PATIENT, MOST_SAMPLES // max(dataset.n_patients, 1)))
    order = np.lexsort((times, domains))
    counts = np.bincount(domains, minlength=dataset.n_patients)
    position = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    taken = np.minimum(counts, each)[domains[order]]
    # The n-th sample is taken where n times the share taken passes a whole number.
    share = taken / counts[domains[order]]
    chosen = np.sort(order[np.floor((position + 1) * share + 1e-9) > np.floor(position * share + 1e-9)])
    if algorithm.backbone.crop is not None:
        # A sequence model reads whole sessions.
        return _embed(algorithm, dataset)[chosen], domains[chosen]
    return _embed(algorithm, dataset.select(chosen)), domains[chosen]


def distances_so_far(
    algorithm: Algorithm, dataset: DomainDataset, reference: Reference, known: EmbeddingSums | None = None
) -> npt.NDArray[np.float64]:
    """How far each sample's patient is from the training patients, known from samples up to this one, ``(samples,)``.

    - ``dataset``: With times.
    - ``known``: Of the dataset's patients before these samples, which are added to it.
    """
    assert dataset.times is not None
    distances = np.empty(len(dataset))
    for rows in whole_patients(dataset):
        part = dataset.select(rows)
        given = _embed(algorithm, part), part.domains.cpu().numpy(), dataset.times[rows].cpu().numpy()
        before = None if known is None else known.before(*given[1:])
        distances[rows.cpu().numpy()] = reference.distances_so_far(*given, before)
        if known is not None:
            known.add(*given)
    return distances


def _embed(algorithm: Algorithm, dataset: DomainDataset) -> npt.NDArray[np.float32]:
    """The features v and, where the algorithm has it, the domain factor z beside them, ``(samples, dim)``."""
    embeddings = embed_dataset(algorithm, dataset)
    return torch.cat([embeddings[name] for name in ("v", "z") if name in embeddings], dim=1).numpy()


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Keep a calibration in a run folder."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "on_average.thresholds": calibration.on_average.thresholds,
        "for_most.thresholds": calibration.for_most.thresholds,
    }
    if calibration.reference is not None:
        for name, values in vars(calibration.reference).items():
            arrays[f"reference.{name}"] = values.astype(np.float32)
    meta: dict[str, Json] = {
        "temperature": calibration.temperature,
        "on_average": {"level": calibration.on_average.level, "share": calibration.on_average.share},
        "for_most": {"level": calibration.for_most.level, "share": calibration.for_most.share},
        "limit": calibration.limit if np.isfinite(calibration.limit) else None,
        "false_alarms": calibration.false_alarms,
        "patients": calibration.patients,
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}
    write_tensors(folder / CALIBRATION, tensors, meta)


def _check_calibration(calibration: Calibration) -> None:
    """Raise a plain error if a value is one that no validation patients can give."""
    if not 0 < calibration.temperature < np.inf:
        raise ValueError(f"the temperature is {calibration.temperature}")
    for rule in (calibration.on_average, calibration.for_most):
        if not (0 <= rule.level <= 1 and 0 <= rule.share <= 1):
            raise ValueError(f"a prediction set promises {rule.level} and {rule.share}")
        if rule.thresholds.ndim != 1 or np.isnan(rule.thresholds).any():
            raise ValueError("a threshold of a prediction set is no number")
    if not calibration.limit >= 0 or not 0 <= calibration.false_alarms <= 1 or calibration.patients < 0:
        raise ValueError("the limit of novelty is impossible")
    reference = calibration.reference
    if reference is not None:
        dim = len(reference.mean)
        if reference.mean.shape != (dim,) or reference.axes.shape != (dim, dim) or reference.within.shape != (dim,):
            raise ValueError("the training patients' reference has impossible shapes")
        if not all(np.isfinite(values).all() for values in vars(reference).values()) or (reference.within < 0).any():
            raise ValueError("the training patients' reference has impossible values")


def read_calibration(folder: str | Path) -> Calibration | None:
    """The calibration of a run folder; ``None`` for a run that was made without one."""
    path = Path(folder) / CALIBRATION
    if not path.exists():
        return None
    tensors, meta = read_tensors(path)
    arrays = {name: tensor.to(torch.float64).numpy() for name, tensor in tensors.items()}
    try:
        rules = {name: SetRule(arrays[f"{name}.thresholds"], **meta[name]) for name in ("on_average", "for_most")}
        reference = None
        if "reference.mean" in arrays:
            reference = Reference(*(arrays[f"reference.{name}"] for name in ("mean", "axes", "within")))
        limit = np.inf if meta["limit"] is None else float(meta["limit"])
        calibration = Calibration(
            float(meta["temperature"]), rules["on_average"], rules["for_most"], reference, limit,
            float(meta["false_alarms"]), int(meta["patients"]),
        )  # fmt: skip
        _check_calibration(calibration)
        return calibration
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StorageError(f"{path} does not hold a calibration ({error}): train the run again") from error
