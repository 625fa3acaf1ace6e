"""From what was typed to the options of runs, saying where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manydg.cli._options import parse_settings

if TYPE_CHECKING:
    from manydg.studies.settings import Options

NONE = "none"


@dataclass(frozen=True)
class Typed:
    """What a command was given about the settings of its runs; ``None`` where it was given nothing."""

    config: str | None
    epochs: int | None
    batch_size: int | None
    lr: float | None
    weight_decay: float | None
    backbone: str | None
    backbone_option: list[str]
    set_: list[str]
    context: str | None = None

    def options(self, dataset: Path, algorithm: str | None = None) -> Options:
        """The options of runs on a dataset; where one algorithm runs alone, its settings may be named without it."""
        from manydg.cli._progress import console
        from manydg.data.storage import read_description
        from manydg.studies.settings import changed

        described = read_description(dataset)
        base = _base(self.config, described.info.source)
        if base.origin:
            console.print(f"settings: {base.origin}{_how_to_see(base.origin)}")
        training = {
            name: getattr(self, name)
            for name in ("epochs", "batch_size", "lr", "weight_decay", "context")
            if getattr(self, name) is not None
        }
        sets = {_whose(name, algorithm): value for name, value in parse_settings(self.set_).items()}
        sets |= {f"backbone.{name}": value for name, value in parse_settings(self.backbone_option).items()}
        return changed(base, training=training, backbone=self.backbone, sets=sets)


def _base(config: str | None, source: str | None) -> Options:
    from manydg.studies.settings import Options, preset_names, read_preset, read_settings

    if config == NONE:
        return Options()
    if config is not None:
        return read_settings(config)
    return read_preset(str(source)) if source in preset_names() else Options()


def _how_to_see(origin: str) -> str:
    name = origin.rpartition(" ")[2]
    return f" ('manydg show {name}'; '--config none' for the program's own)" if origin.startswith("the paper") else ""


def _whose(name: str, algorithm: str | None) -> str:
    return name if "." in name or algorithm is None else f"{algorithm}.{name}"
