"""Options of a study: what all algorithms share, and what each has of its own; read from files, and shown as such.

A settings file is TOML with four parts: ``[training]`` for what all algorithms share, ``[backbone]``, ``[head]`` for
every algorithm that has Base's head, and one table for each algorithm under ``[algorithms.NAME]``, whose settings are
that algorithm's alone and come before the head's. ``extends = "NAME"`` builds on a preset: the paper's settings for one
of its tasks.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from manydg.algorithms import ALGORITHMS
from manydg.backbones import BACKBONES, SEARCHED_OPTIONS, auto_backbone
from manydg.config import SEARCHED, Searched, TrainingConfig
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.errors import ConfigError, StorageError, unknown_name
from manydg.files import Json, ParsedJson
from manydg.targets import target_of
from manydg.training.fit import selection_metric

OWN_TRAINING = ("epochs", "batch_size", "lr", "weight_decay")
"""Training options that an algorithm may have of its own."""


@dataclass(frozen=True)
class Options:
    """The options of a study.

    - ``common``: What all algorithms share.
    - ``own``: By algorithm: its settings, and its own values of :data:`OWN_TRAINING`.
    - ``origin``: Where they come from, in words; empty for the program's defaults.
    - ``head``: Settings of every algorithm that has them; its own come first.
    - ``tuned``: Algorithm and seed to the configuration that a search chose for that split, instead of all the others.
    """

    common: TrainingConfig = field(default_factory=TrainingConfig)
    own: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    origin: str = ""
    head: Mapping[str, Json] = field(default_factory=dict)
    tuned: Mapping[tuple[str, int], TrainingConfig] = field(default_factory=dict)

    def of(self, algorithm: str, seed: int | None = None, **settings: Json) -> TrainingConfig:
        """The configuration of an algorithm; settings given here come before its own.

        Examples
        --------
        >>> options = Options(TrainingConfig(lr=1e-3), {"mldg": {"lr": 5e-3, "inner_lr": 1e-2}})
        >>> options.of("mldg").lr, options.of("mldg").settings, options.of("base").lr
        (0.005, {'inner_lr': 0.01}, 0.001)
        """
        at = self.common.seed if seed is None else seed
        if (algorithm, at) in self.tuned:
            chosen = self.tuned[algorithm, at]
            return chosen.replace(settings={**chosen.settings, **settings})
        known = setting_names(algorithm)
        head = {name: value for name, value in self.head.items() if name in known}
        own = {**head, **self.own.get(algorithm, {})}
        training = {name: own.pop(name) for name in OWN_TRAINING if name in own}
        shared = self.common.settings if self.common.algorithm == algorithm else {}
        return self.common.replace(algorithm=algorithm, settings={**shared, **own, **settings}, seed=at, **training)


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


def backbone_defaults(name: str) -> dict[str, Json]:
    """The options of a backbone with their defaults, those that are plain values."""
    parameters = inspect.signature(BACKBONES.get(name)).parameters
    return {
        key: parameter.default
        for key, parameter in parameters.items()
        if isinstance(parameter.default, bool | int | float | str) and key != "schema"
    }


SECTIONS = ("training", "backbone", "head", "algorithms")
_ELSEWHERE = ("algorithm", "settings", "backbone", "backbone_options", "seed")
Settings = Mapping[str, Json]
"""Values by name."""


def preset_names() -> list[str]:
    """The tasks whose settings in the paper are known."""
    folder = files("manydg.studies") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """A preset's file as it is, comments and all."""
    if name not in preset_names():
        raise unknown_name("preset", name, preset_names())
    return (files("manydg.studies") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def read_preset(name: str) -> Options:
    """The paper's settings for one of its tasks.

    Examples
    --------
    >>> read_preset("mimic3").of("manydg").batch_size
    64
    """
    tables = SettingsTables.from_toml(tomllib.loads(preset_text(name)))
    return make_options(tables, f"the paper's settings for {name}")


def read_settings(name: str | Path) -> Options:
    """Settings from a TOML file, or a preset by its name.

    - raises ConfigError: If a name or value makes no sense, with the nearest that does.
    - raises StorageError: If there is no such file, or it is no TOML.
    """
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        return read_preset(str(name))
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise StorageError(f"{path} is no TOML file: {error}") from error
    check_shape(content, path)
    try:
        base = content.pop("extends", None)
        whole = content if base is None else _extended(tomllib.loads(preset_text(base)), content)
        return make_options(SettingsTables.from_toml(whole), str(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def check_shape(content: ParsedJson, path: Path) -> None:
    """Raise if a file's tables are not where they belong."""
    from pydantic import BaseModel, ConfigDict, ValidationError

    class Backbone(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        name: str = "auto"
        options: dict[str, object] = {}

    class SettingsFile(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        extends: str | None = None
        training: dict[str, object] = {}
        backbone: Backbone = Backbone()
        head: dict[str, object] = {}
        algorithms: dict[str, dict[str, object]] = {}

    try:
        SettingsFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ("name", "options") if len(first["loc"]) > 1 else ("extends", *SECTIONS)
            raise ConfigError(f"{path}: {unknown_name('entry', str(first['loc'][-1]), known)}") from None
        raise ConfigError(f"{path}: '{where}': {first['msg'].lower()}, not {first['input']!r}") from None


@dataclass(frozen=True)
class SettingsTables:
    """The tables of a settings file."""

    training: Settings = field(default_factory=dict)
    backbone: str = "auto"
    backbone_options: Settings = field(default_factory=dict)
    head: Settings = field(default_factory=dict)
    algorithms: Mapping[str, Settings] = field(default_factory=dict)

    @staticmethod
    def from_toml(content: ParsedJson) -> SettingsTables:
        backbone = content.get("backbone", {})
        return SettingsTables(
            training=content.get("training", {}),
            backbone=backbone.get("name", "auto"),
            backbone_options=backbone.get("options", {}),
            head=content.get("head", {}),
            algorithms=content.get("algorithms", {}),
        )


def make_options(tables: SettingsTables, origin: str) -> Options:
    """Options from a file's tables, every name and value checked."""
    for name in tables.training:
        if name not in _training_names():
            raise unknown_name("training option", name, _training_names())
    check_backbone(tables.backbone, tables.backbone_options)
    common = TrainingConfig.from_mapping(
        {**tables.training, "backbone": tables.backbone, "backbone_options": dict(tables.backbone_options)}
    )
    own = {name: dict(values) for name, values in tables.algorithms.items()}
    options = Options(common, own, origin, head=dict(tables.head))
    _check_settings("base", options.head)
    for name in own:
        check_algorithm(options, name)
    return options


def check_algorithm(options: Options, name: str) -> None:
    """Raise if an algorithm's own settings are not settings it has, or have impossible values."""
    _check_settings(name, options.own[name], OWN_TRAINING)
    ALGORITHMS.get(name).settings_from(options.of(name).settings)


def _check_settings(algorithm: str, given: Iterable[str], further: Sequence[str] = ()) -> None:
    known = {*setting_names(algorithm), *further}
    for setting in given:
        if setting not in known:
            raise unknown_name(f"setting of {algorithm}", setting, known)


def check_backbone(name: str, options: Settings) -> None:
    """Raise if there is no such backbone or it has no such options; what suits ``auto`` is seen with the data."""
    if name == "auto":
        return
    parameters = inspect.signature(BACKBONES.get(name)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in options:
        if key not in parameters or key == "schema":
            raise unknown_name(f"option of backbone {name}", key, [p for p in parameters if p != "schema"])


def changed(options: Options, *, training: Settings, backbone: str | None, sets: Settings) -> Options:
    """Options with what was given on the command line.

    - ``training``: Training options for all algorithms: they come before an algorithm's own.
    - ``backbone``: Another backbone, without the options of the one it replaces.
    - ``sets``: ``training.NAME``, ``backbone.NAME`` or ``ALGORITHM.NAME`` to a value.
    """
    same_backbone = backbone is None or backbone == options.common.backbone
    backbone_options = dict(options.common.backbone_options) if same_backbone else {}
    for_all = {name: getattr(options.common, name) for name in _training_names()} | dict(training)
    own = {
        name: {key: value for key, value in values.items() if key not in training}
        for name, values in options.own.items()
    }
    for name, value in sets.items():
        part, dot, key = name.partition(".")
        if not dot:
            raise ConfigError(
                f"'{name}' does not say whose setting it is: write ALGORITHM.{name}, training.{name} or backbone.{name}"
            )
        tables = {"training": for_all, "backbone": backbone_options}
        (tables[part] if part in tables else own.setdefault(part, {}))[key] = value
    whole = SettingsTables(for_all, backbone or options.common.backbone, backbone_options, options.head, own)
    return make_options(whole, options.origin)


def _training_names() -> list[str]:
    return [entry.name for entry in dataclasses.fields(TrainingConfig) if entry.name not in _ELSEWHERE]


def _extended(preset: ParsedJson, content: ParsedJson) -> ParsedJson:
    """A preset with what a file says instead; another backbone has no options of the preset's."""
    backbone = content.get("backbone", {}).get("name")
    kept = {key: part for key, part in preset.items() if key != "backbone" or backbone in (None, part["name"])}
    return _overridden(kept, content)


def _overridden(base: ParsedJson, content: ParsedJson) -> ParsedJson:
    whole = dict(base)
    for name, value in content.items():
        nested = isinstance(value, Mapping) and isinstance(base.get(name), Mapping)
        whole[name] = _overridden(base[name], value) if nested else value
    return whole


def shown(name: str | None) -> str:
    """A preset's file, an algorithm's or a backbone's settings as TOML; without a name, what there is to show.

    Examples
    --------
    >>> print(shown("prototype").splitlines()[2])
    [algorithms.prototype]
    """
    if name is None:
        kinds = {"presets": preset_names(), "algorithms": ALGORITHMS.names(), "backbones": BACKBONES.names()}
        return "".join(f"{kind}: {', '.join(names)}\n" for kind, names in kinds.items())
    if name in preset_names():
        return preset_text(name)
    if name in ALGORITHMS.names():
        return _algorithm(name)
    if name in BACKBONES.names():
        return _backbone(name)
    raise unknown_name(
        "preset, algorithm or backbone", name, [*preset_names(), *ALGORITHMS.names(), *BACKBONES.names()]
    )


def _algorithm(name: str) -> str:
    cls = ALGORITHMS.get(name)
    lines = [_comment(cls.__doc__), f"[algorithms.{name}]"]
    for entry in dataclasses.fields(cls.Settings):
        about = entry.metadata
        lines.append(
            f"{entry.name} = {_value(entry.default)}  # {about.get('help', '')}; {_drawn(about.get(SEARCHED))}"
        )
    if cls.sampling != "whole":
        shared = (entry for entry in dataclasses.fields(TrainingConfig) if SEARCHED in entry.metadata)
        lines += [f"# training.{entry.name}: {_drawn(entry.metadata[SEARCHED])}" for entry in shared]
    return "\n".join(lines) + "\n"


def _backbone(name: str) -> str:
    lines = [_comment(BACKBONES.get(name).__doc__), "[backbone]", f'name = "{name}"', "", "[backbone.options]"]
    for key, value in backbone_defaults(name).items():
        lines.append(
            f"{key} = {_value(value)}" + (f"  # {_drawn(drawn)}" if (drawn := SEARCHED_OPTIONS.get(key)) else "")
        )
    return "\n".join(lines) + "\n"


def _comment(text: str | None) -> str:
    """The first sentence or two of a docstring as a comment."""
    first = " ".join((text or "").strip().split("\n\n")[0].split())
    return textwrap.fill(first, 110, initial_indent="# ", subsequent_indent="# ")


def _drawn(values: Searched | None) -> str:
    """What ``manydg tune`` draws a value from, in words."""
    return "any value" if values is None else f"searched from {values}"


def _value(value: object) -> str:
    return json.dumps(value)
