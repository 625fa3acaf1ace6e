"""The options of a training run, each checked here."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from manydg.errors import ConfigError, unknown_name
from manydg.files import Json, ParsedJson

PRECISIONS = ("auto", "float32", "tf32", "bf16")
EXECUTIONS = ("auto", "plain", "captured", "compiled", "deterministic")
SPLITS = ("patient", "site")
CONTEXTS = ("auto", "none", "offline", "causal")
LOSSES = ("auto", "squared", "huber")
NO_SEQUENCE = "none"
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Seconds of the units of time."""


def duration(text: str, name: str) -> float:
    """Seconds of a time such as ``6h``, ``30min``, ``2d`` or ``90s``.

    Examples
    --------
    >>> duration("1.5h", "horizon")
    5400.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(s|min|h|d)\s*", str(text))
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{name} is '{text}'; write a time with its unit, such as 6h, 30min, 2d or 90s")
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True)
class DecisionRule:
    """What a decision threshold has to keep on validation patients.

    - ``kind`` {"sensitivity", "precision", "alarms"}
    - ``value``: At least this sensitivity or precision; at most so many false alarms per patient-day.
    - ``text``: As it was written.
    """

    kind: str
    value: float
    text: str

    @staticmethod
    def parse(text: str) -> DecisionRule:
        """A rule from ``sensitivity=.9``, ``precision=.5`` or ``alarms=1/day``.

        Examples
        --------
        >>> DecisionRule.parse("alarms=0.5/day")
        DecisionRule(kind='alarms', value=0.5, text='alarms=0.5/day')
        """
        number = r"(\d+(?:\.\d*)?|\.\d+)"
        match = re.fullmatch(rf"(?:(sensitivity|precision)={number}|(alarms)={number}/day)", str(text).strip())
        if match is not None:
            kind, value = match[1] or match[3], float(match[2] or match[4])
            if 0 < value < (math.inf if kind == "alarms" else 1):
                return DecisionRule(kind, value, match[0])
        raise ConfigError(
            f"at is '{text}'; write what the threshold has to keep on validation patients: sensitivity=.9, "
            "precision=.5 (between 0 and 1) or alarms=1/day"
        )


@dataclass(frozen=True)
class Range:
    """Numbers that a search draws from, both ends included.

    - ``log``: Whether the logarithm is drawn evenly, rather than the number.
    - ``whole``: Whether only whole numbers are drawn.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def including(self, value: float) -> Range:
        """The range, widened to hold a value; a logarithmic one that gets a 0 is no longer logarithmic."""
        low = min(self.low, value)
        return dataclasses.replace(self, low=low, high=max(self.high, value), log=self.log and low > 0)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"

    def to_json(self) -> dict[str, Json]:
        return {"low": self.low, "high": self.high, "log": self.log, "whole": self.whole}


@dataclass(frozen=True)
class Choices:
    """The few values that a search draws from.

    - ``multiples``: Whether the options are to be multiplied by the value that the user gave, a whole number.
    """

    options: tuple[str | int | float, ...]
    multiples: bool = False

    def including(self, value: str | float) -> Choices:
        """The same options and a value."""
        if self.multiples:
            return Choices(tuple(sorted({max(2, int(float(factor) * float(value))) for factor in self.options})))
        return self if value in self.options else Choices((value, *self.options))

    def __str__(self) -> str:
        return ", ".join(map(str, self.options)) + (" times the given value" if self.multiples else "")

    def to_json(self) -> dict[str, Json]:
        return {"options": list(self.options)}


Searched = Range | Choices
SEARCHED = "searched"
"""The key of a dataclass field's metadata that says what a search of its value draws from."""


def searched_from_json(value: ParsedJson) -> Searched:
    """What :meth:`Range.to_json` or :meth:`Choices.to_json` gave."""
    if "options" in value:
        return Choices(tuple(value["options"]))
    return Range(float(value["low"]), float(value["high"]), bool(value["log"]), bool(value["whole"]))


def _searched(default: Any, values: Searched) -> Any:
    """A field of a dataclass that ``manydg tune`` searches."""
    return field(default=default, metadata={SEARCHED: values})


@dataclass(frozen=True)
class TrainingConfig:
    """All options that determine a run's result, besides the data and the code.

    Parameters
    ----------
    algorithm, settings
        Name of the algorithm and its settings; the others have their defaults.
    backbone, backbone_options
        Name of the backbone, or ``package.module:Class``, and its options; ``auto`` picks one that fits the inputs.
    epochs, batch_size, lr, weight_decay
        Of Adam; ``batch_size`` counts samples, so that a step of pairs holds half as many pairs.
    seed : int
        Decides split, initial weights, order and dropout.
    ratios : tuple of float
        Shares of the patients in training, validation and test.
    stratify : bool
        Whether every side gets its share of the patients of each label (:func:`manydg.data.splits.patient_labels`).
    folds : int
        0 draws a random split for each seed. With K folds, at least 3, seed ``s`` is fold ``s % K`` of repeat
        ``s // K``, in which the patients are divided into K groups: K seeds test everyone once. ``ratios`` are ignored.
    split : {"patient", "site"}
        Whether patients are drawn, or whole sites (hospitals) with all their patients; ``ratios`` and ``folds`` are of
        sites then, and with as many folds as sites every site is tested once by a model of the others.
    selection : str, optional
        Validation metric that chooses the epoch; the target's own if not given.
    loss : {"auto", "squared", "huber"}
        Supervised loss of a regression target; ``auto`` is squared. Other targets have the loss of their kind.
    context : {"auto", "none", "offline", "causal"}
        Patient context: whether the model gets columns computed from the patient's other samples, without labels: from
        all of them, or from the earlier ones; ``auto`` is the algorithm's own choice.
    context_options : dict
        Options of :class:`manydg.data.context.ContextOptions`.
    sequence : str
        ``none``, or the network on top of the backbone that reads a patient's samples in the order of time:
        ``gru``, ``transformer`` or ``conv``.
    sequence_options : dict
        Options of :class:`manydg.data.timeline.SequenceOptions`.
    precision : {"auto", "float32", "tf32", "bf16"}
        Arithmetic of the training steps; ``auto`` is float32 on a CPU and what is fastest for the backbone on a GPU.
    execution : {"auto", "plain", "captured", "compiled", "deterministic"}
        How steps run: eagerly, replayed from captured CUDA graphs, compiled and captured, or eagerly with deterministic
        kernels alone; ``auto`` is eager on a CPU and the fastest on a GPU.
    at : str, optional
        What the decision threshold of a binary target has to keep on validation patients: ``sensitivity=.9``,
        ``precision=.5`` or ``alarms=1/day``; by default it is the one with the highest F1.
    silence : str, optional
        Minimum time between two alarms, such as ``6h``; by default the horizon of the event.
    """

    algorithm: str = "manydg"
    settings: Mapping[str, Json] = field(default_factory=dict)
    backbone: str = "auto"
    backbone_options: Mapping[str, Json] = field(default_factory=dict)
    epochs: int = 20
    batch_size: int = _searched(256, Choices((0.25, 0.5, 1, 2, 4), multiples=True))
    lr: float = _searched(5e-4, Range(5e-5, 5e-3, log=True))
    weight_decay: float = _searched(1e-5, Range(1e-7, 1e-2, log=True))
    seed: int = 0
    ratios: tuple[float, float, float] = (0.8, 0.1, 0.1)
    stratify: bool = False
    folds: int = 0
    split: str = "patient"
    selection: str | None = None
    loss: str = "auto"
    context: str = "auto"
    context_options: Mapping[str, Json] = field(default_factory=dict)
    sequence: str = NO_SEQUENCE
    sequence_options: Mapping[str, Json] = field(default_factory=dict)
    precision: str = "auto"
    execution: str = "auto"
    at: str | None = None
    silence: str | None = None

    def __post_init__(self) -> None:
        _check_kinds(self)
        _check_count("epochs", self.epochs)
        _check_count("batch_size", self.batch_size)
        _check_number("lr", self.lr)
        _check_number("weight_decay", self.weight_decay)
        if not isinstance(self.stratify, bool):
            raise ConfigError(f"stratify is {self.stratify!r}; it must be true or false")
        if isinstance(self.folds, bool) or not isinstance(self.folds, int) or self.folds < 0 or self.folds in (1, 2):
            raise ConfigError(f"folds is {self.folds!r}; it must be 0, or 3 or more: to test, validate and train")
        if self.lr == 0:
            raise ConfigError("lr is 0; it must be above 0")
        _check_name("unit of splits", self.split, SPLITS)
        if self.split == "site" and self.stratify:
            raise ConfigError("sites are not stratified by label: leave out stratify, or split by patient")
        _check_name("loss", self.loss, LOSSES)
        if self.at is not None:
            DecisionRule.parse(self.at)
        if self.silence is not None:
            duration(self.silence, "silence")
        _check_name("kind of context", self.context, CONTEXTS)
        _check_name("precision", self.precision, PRECISIONS)
        _check_name("execution", self.execution, EXECUTIONS)
        # Torch seeds have 64 bits, and every epoch of every seed has one of its own.
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed!r}; it must be a whole number from 0 to {2**32 - 1}")

    @staticmethod
    def from_mapping(given: ParsedJson) -> TrainingConfig:
        """A configuration from options by name, as a file or a command gives them."""
        names = {entry.name for entry in dataclasses.fields(TrainingConfig)}
        for name in given:
            if name not in names:
                raise unknown_name("training option", name, names)
        return TrainingConfig(**{**given, **({"ratios": tuple(given["ratios"])} if "ratios" in given else {})})

    def to_json(self) -> dict[str, Json]:
        """As a run's record keeps it."""
        return {**dataclasses.asdict(self), "ratios": list(self.ratios)}

    def replace(self, **changes: Any) -> TrainingConfig:
        """The configuration with some options changed, checked again."""
        return dataclasses.replace(self, **changes)


def _check_kinds(config: TrainingConfig) -> None:
    """Raise if a name is no text, options are no mapping, or the shares of the patients are no three shares."""
    for name in ("algorithm", "backbone", "split", "loss", "context", "sequence", "precision", "execution"):
        if not isinstance(getattr(config, name), str):
            raise ConfigError(f"{name} is {getattr(config, name)!r}; it must be text")
    if config.selection is not None and not isinstance(config.selection, str):
        raise ConfigError(f"selection is {config.selection!r}; it must be the name of a metric")
    for name in ("settings", "backbone_options", "context_options", "sequence_options"):
        given = getattr(config, name)
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise ConfigError(f"{name} is {given!r}; it must be values by name")
    if not isinstance(config.ratios, tuple) or len(config.ratios) != 3:
        raise ConfigError(f"ratios is {config.ratios!r}; it must be three shares: training, validation and test")
    for share in config.ratios:
        _check_number("a share in ratios", share)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a finite number of at least 0")


def _check_name(kind: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise unknown_name(kind, str(value), known)


def pick_device(name: str) -> torch.device:
    """The device to train on; ``auto`` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device '{name}'; say auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device '{name}'; say auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device '{name}' was asked for, but this machine has no GPU that torch can use: say cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device '{name}' was asked for, but this machine has {torch.cuda.device_count()} GPU(s)")
    return device
