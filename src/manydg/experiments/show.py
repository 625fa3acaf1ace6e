"""Settings as text that can be read, saved and given back."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any

from manydg.algorithms import ALGORITHMS
from manydg.backbones import BACKBONES
from manydg.errors import unknown_name
from manydg.experiments.options import backbone_defaults
from manydg.experiments.settings_file import preset_names, preset_text


def shown(name: str | None) -> str:
    """A preset's file, an algorithm's or a backbone's settings as TOML; without a name, what there is to show.

    Examples
    --------
    >>> print(shown("prototype").splitlines()[1])
    [algorithms.prototype]
    """
    if name is None:
        return _contents()
    if name in preset_names():
        return preset_text(name)
    if name in ALGORITHMS.names():
        return _algorithm(name)
    if name in BACKBONES.names():
        return _backbone(name)
    raise unknown_name(
        "preset, algorithm or backbone", name, [*preset_names(), *ALGORITHMS.names(), *BACKBONES.names()]
    )


def _contents() -> str:
    kinds = {"presets": preset_names(), "algorithms": ALGORITHMS.names(), "backbones": BACKBONES.names()}
    return "".join(f"{kind}: {', '.join(names)}\n" for kind, names in kinds.items())


def _algorithm(name: str) -> str:
    cls = ALGORITHMS.get(name)
    lines = [_comment(cls.__doc__), f"[algorithms.{name}]"]
    for entry in dataclasses.fields(cls.Settings):
        about = entry.metadata
        allowed = " or ".join(about["options"]) if "options" in about else _range(about)
        lines.append(f"{entry.name} = {_value(entry.default)}  # {about.get('help', '')}; {allowed}")
    return "\n".join(lines) + "\n"


def _backbone(name: str) -> str:
    lines = [_comment(BACKBONES.get(name).__doc__), "[backbone]", f'name = "{name}"', "", "[backbone.options]"]
    lines += [f"{key} = {_value(value)}" for key, value in backbone_defaults(name).items()]
    return "\n".join(lines) + "\n"


def _comment(text: str | None) -> str:
    """The first sentence or two of a docstring as a comment."""
    first = " ".join((text or "").strip().split("\n\n")[0].split())
    return textwrap.fill(first, 110, initial_indent="# ", subsequent_indent="# ")


def _range(about: Any) -> str:
    return f"searched from {about['low']:g} to {about['high']:g}" if "low" in about else "any value"


def _value(value: Any) -> str:
    return json.dumps(value)
