"""Backbones, x -> v: one file each. See ``CONTRIBUTING.md`` for how to add one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from manydg.backbones._backbone import Backbone, Inputs, SingleInput, as_backbone
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError, unknown_name
from manydg.registry import Registry

__all__ = ["BACKBONES", "Backbone", "Inputs", "SingleInput", "as_backbone", "build_backbone"]

BACKBONES: Registry[Backbone] = Registry("backbone", __name__, Backbone)


def build_backbone(name: str, schema: InputSchema, options: Mapping[str, Any] | None = None) -> Backbone:
    """Build a backbone by its name, or any ``nn.Module`` class by ``package.module:Class``.

    The class is called with the options given, and with ``schema`` if it names that parameter.
    """
    cls: type[nn.Module] = BACKBONES.get(name)
    if not issubclass(cls, nn.Module):
        raise ConfigError(f"backbone '{name}' is not an nn.Module: derive it from torch.nn.Module or manydg.Backbone")
    parameters = inspect.signature(cls).parameters
    given = dict(options or {})
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in given:
        if key not in parameters and not takes_any:
            raise unknown_name(f"option of backbone {name}", key, [p for p in parameters if p != "schema"])
    if "schema" in parameters:
        given["schema"] = schema
    try:
        module = cls(**given)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
        asked = ", ".join(f"{key}={value!r}" for key, value in (options or {}).items()) or "no options"
        raise ConfigError(f"backbone '{name}' cannot be built with {asked}: {error}") from error
    return as_backbone(module, schema)
