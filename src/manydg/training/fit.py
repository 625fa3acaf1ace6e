"""From data and a configuration to a trained algorithm: what a run and the scikit-learn face have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manydg.algorithms import ALGORITHMS, Algorithm
from manydg.backbones import Backbone, as_backbone, build_backbone
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.errors import DataError, StorageError, unknown_name
from manydg.targets import Target, target_of
from manydg.training.config import TrainingConfig
from manydg.training.distributed import check_divisible, current_team
from manydg.training.loop import TrainingLoop
from manydg.training.memory import refusing_what_does_not_fit
from manydg.training.placing import place
from manydg.training.precision import AS_WRITTEN, Speed
from manydg.training.reporting import Reporter, Silent


@dataclass(frozen=True)
class Fitted:
    """A trained algorithm and how it came about.

    Attributes
    ----------
    algorithm : Algorithm
        With the weights of the epoch that was kept.
    history : list of dict
        One entry per epoch.
    epoch : int
        The epoch whose weights were kept; 0 where there are no epochs.
    selection_rule : str
        How that epoch was chosen.
    speed : Speed
        The precision and execution that were used.
    """

    algorithm: Algorithm
    history: list[dict[str, Any]]
    epoch: int
    selection_rule: str
    speed: Speed = AS_WRITTEN


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

    Parameters
    ----------
    config : TrainingConfig
    train, val : DomainDataset
        Training and validation patients; what is fitted to the inputs comes from the training patients alone.
    device : torch.device
    backbone : nn.Module, optional
        A module of the user's own instead of the configuration's.
    folder : Path, optional
        Where the checkpoint is kept.
    """
    hears = reporter or Silent()
    target = target_of(train.target)
    check_training_labels(target, train)
    metric = selection_metric(config, target)
    algorithm = _build(config, target, train, backbone)
    if current_team() is not None:
        check_divisible(type(algorithm))
    if algorithm.sampling == "whole":
        hears.started(config.algorithm, 0, 1)
        algorithm.fit_whole(train, config.seed)
        return Fitted(algorithm, [], 0, "no epochs to choose from: trained once on the training patients")
    algorithm.to(device)
    placed = place(train, algorithm, device)
    held_back = None if val is None else place(val, algorithm, device)
    loop = TrainingLoop(algorithm, placed, held_back, config, metric, folder, hears)
    loop.run()
    return Fitted(algorithm, loop.history, loop.best_epoch, loop.selection_rule, loop.speed)


def fit_further(
    fitted: Fitted, config: TrainingConfig, train: DomainDataset, val: DomainDataset, device: torch.device
) -> Fitted:
    """Go on training an algorithm on other samples, whose patients have the codes it was built for.

    What was fitted to the inputs stays as it is; optimisers start anew, and the epoch is chosen on validation patients.
    """
    algorithm = fitted.algorithm
    metric = selection_metric(config, algorithm.target)
    placed, held_back = place(train, algorithm, device), place(val, algorithm, device)
    loop = TrainingLoop(algorithm, placed, held_back, config, metric, None, Silent())
    loop.run()
    return Fitted(algorithm, fitted.history + loop.history, loop.best_epoch, loop.selection_rule, loop.speed)


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

    Parameters
    ----------
    source : Path
        Where the weights come from, for the message if they do not fit.
    """
    cls = ALGORITHMS.get(config.algorithm)
    algorithm = cls(_backbone(config, schema, backbone), target, n_domains, cls.settings_from(config.settings))
    try:
        algorithm.load_state_dict(tensors)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise StorageError(
            f"{source} does not fit the model it says it is of ({reason}): open it with the backbone and the version "
            "of the program that it was trained with"
        ) from error
    return algorithm.eval()


def _build(config: TrainingConfig, target: Target, train: DomainDataset, module: nn.Module | None) -> Algorithm:
    torch.manual_seed(config.seed * 1_000_003)
    with refusing_what_does_not_fit():
        backbone = _backbone(config, InputSchema.of(train), module)
    cls = ALGORITHMS.get(config.algorithm)
    algorithm = cls(backbone, target, train.n_patients, cls.settings_from(config.settings))
    # Through the algorithm, because one that has no use for the backbone must not be held to the backbone's demands.
    algorithm.fit_inputs(train)
    return algorithm


def _backbone(config: TrainingConfig, schema: InputSchema, module: nn.Module | None) -> Backbone:
    if module is not None:
        return as_backbone(module, schema)
    name = auto_backbone(schema) if config.backbone == "auto" else config.backbone
    return build_backbone(name, schema, config.backbone_options)


def auto_backbone(schema: InputSchema) -> str:
    """The backbone that fits the inputs: the paper's for its four tasks, and a table's for anything dense.

    Examples
    --------
    >>> from manydg.data.schema import ColumnSchema
    >>> auto_backbone(InputSchema({"x": ColumnSchema("float32", (48,))}))
    'mlp'
    """
    if "diagnoses" in schema.columns:
        return "gamenet"
    if "event_codes" in schema.columns:
        return "event-transformer"
    signal = schema.columns.get("signal") or schema.columns.get("spectrogram")
    if signal is not None:
        return "sleep-cnn" if signal.shape[0] <= 4 else "seizure-cnn"
    return "tabular" if schema.settings.get("missing") else "mlp"


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
    if target.exclusive and bool((truth == truth[0]).all()):
        raise DataError(
            f"all {len(train)} samples of the {train.n_patients} training patients are of one class "
            f"('{target.spec.names[int(truth[0])]}'): there is nothing to learn; use another seed or more patients"
        )
