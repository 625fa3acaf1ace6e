"""Options for several algorithms at once: what they share, and what each has of its own."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manydg.algorithms import ALGORITHMS
from manydg.backbones import BACKBONES
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.targets import target_of
from manydg.training.config import TrainingConfig
from manydg.training.fit import auto_backbone, selection_metric

OWN_TRAINING = ("epochs", "batch_size", "lr", "weight_decay")
"""Training options that an algorithm may have of its own."""


@dataclass(frozen=True)
class Options:
    """The options of a study.

    Parameters
    ----------
    common : TrainingConfig
        What all algorithms share.
    own : mapping of str to mapping
        By algorithm: its settings, and its own values of :data:`OWN_TRAINING`.
    origin : str
        Where they come from, in words; empty for the program's defaults.
    head : mapping
        Settings of every algorithm that has them; its own come first.
    """

    common: TrainingConfig = field(default_factory=TrainingConfig)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    origin: str = ""
    head: Mapping[str, Any] = field(default_factory=dict)

    def of(self, algorithm: str, seed: int | None = None, **settings: Any) -> TrainingConfig:
        """The configuration of an algorithm; settings given here come before its own.

        Examples
        --------
        >>> options = Options(TrainingConfig(lr=1e-3), {"mldg": {"lr": 5e-3, "inner_lr": 1e-2}})
        >>> options.of("mldg").lr, options.of("mldg").settings, options.of("base").lr
        (0.005, {'inner_lr': 0.01}, 0.001)
        """
        known = setting_names(algorithm)
        head = {name: value for name, value in self.head.items() if name in known}
        own = {**head, **self.own.get(algorithm, {})}
        training = {name: own.pop(name) for name in OWN_TRAINING if name in own}
        shared = self.common.settings if self.common.algorithm == algorithm else {}
        return self.common.replace(
            algorithm=algorithm,
            settings={**shared, **own, **settings},
            seed=self.common.seed if seed is None else seed,
            **training,
        )


def setting_names(algorithm: str) -> set[str]:
    """The names of an algorithm's settings."""
    return {entry.name for entry in dataclasses.fields(ALGORITHMS.get(algorithm).Settings)}


def as_options(options: Options | TrainingConfig | None) -> Options:
    """Options from what a caller has."""
    if isinstance(options, Options):
        return options
    return Options(options or TrainingConfig())


def spelled_out(config: TrainingConfig, dataset: DomainDataset) -> TrainingConfig:
    """The configuration with every default of the algorithm and the backbone in it, as the dataset decides them.

    Two configurations that do the same are equal afterwards.
    """
    settings = ALGORITHMS.get(config.algorithm).settings_from(config.settings)
    backbone = auto_backbone(InputSchema.of(dataset)) if config.backbone == "auto" else config.backbone
    return config.replace(
        settings=dataclasses.asdict(settings),
        backbone=backbone,
        backbone_options={**backbone_defaults(backbone), **config.backbone_options},
        selection=selection_metric(config, target_of(dataset.target)),
    )


def backbone_defaults(name: str) -> dict[str, Any]:
    """The options of a backbone with their defaults, those that are plain values."""
    parameters = inspect.signature(BACKBONES.get(name)).parameters
    return {
        key: parameter.default
        for key, parameter in parameters.items()
        if isinstance(parameter.default, bool | int | float | str) and key != "schema"
    }
