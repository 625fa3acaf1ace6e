"""Classes by name: one file is one entry, and installed plug-ins join by entry points.

A package of entries holds one module per entry. The module ``my_idea.py`` is the entry ``my-idea`` and defines one
public subclass of the registry's base class. Modules that begin with an underscore are helpers. A plug-in declares the
entry-point group of the registry's package (``manydg.algorithms``, ``manydg.backbones``).

Names also come from files: models, settings, results. So a class outside the registry, ``package.module:Class``, is
imported only by :meth:`Registry.trust`, which is called with what the user typed or wrote in Python, never with what
was read.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from manydg.errors import ConfigError, unknown_name

T = TypeVar("T")


class LazyModule(ModuleType):
    """A package that is imported when one of its names is first used, where most calls use none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


class Registry(Generic[T]):
    """The classes of one kind by name; a module is imported when its class is first used.

    - ``kind``: What messages call an entry.
    - ``package``: The package whose modules are the entries, and the entry-point group of plug-ins.
    - ``base``: The class every entry derives from.
    """

    def __init__(self, kind: str, package: str, base: Callable[..., T]) -> None:
        self.kind, self.package = kind, package
        self.base = cast("type[T]", base)
        self._trusted: dict[str, type[T]] = {}

    def names(self) -> list[str]:
        return sorted({*self._built_in(), *self._plugins()})

    def get(self, name: str) -> type[T]:
        """The class of an entry, or one outside the registry that was named to :meth:`trust` before."""
        if name in self._trusted:
            return self._trusted[name]
        if ":" in name:
            raise ConfigError(
                f"{self.kind} '{name}' is a class outside of manydg, which is not imported because a file names it: if "
                f"you trust its code, name it yourself with --{self.kind} {name} ({self.kind}='{name}' in Python)"
            )
        if name in (modules := self._built_in()):
            return self._only_class(modules[name])
        if name in (plugins := self._plugins()):
            return self._import(plugins[name])
        raise unknown_name(self.kind, name, self.names())

    def trust(self, name: str) -> None:
        """Let :meth:`get` find the class ``package.module:Class``, which the user has named; other names do nothing.

        The class may be in the working directory.
        """
        if ":" not in name or name in self._trusted:
            return
        # Unlike "python -m", an installed command does not import from the working directory.
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        self._trusted[name] = self._import(name)

    def summary(self, name: str) -> str:
        """The first line of the docstring of an entry's module, without its full stop, read without importing it."""
        built_in = name in self._built_in()
        spec = importlib.util.find_spec(self.package if built_in else self._plugins()[name].partition(":")[0])
        if spec is None or spec.origin is None:
            return ""
        # To look a module up inside its package would import the package.
        origin = Path(spec.origin)
        file = origin.with_name(f"{name.replace('-', '_')}.py") if built_in else origin
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        return docstring.partition("\n")[0].rstrip(".")

    def _built_in(self) -> dict[str, str]:
        spec = importlib.util.find_spec(self.package)
        paths = spec.submodule_search_locations if spec else None
        modules = [m.name for m in pkgutil.iter_modules(paths or []) if not m.name.startswith("_")]
        return {name.replace("_", "-"): f"{self.package}.{name}" for name in modules}

    def _plugins(self) -> dict[str, str]:
        return {entry.name: entry.value for entry in entry_points(group=self.package)}

    def _only_class(self, module_name: str) -> type[T]:
        module = importlib.import_module(module_name)
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, self.base) and value.__module__ == module_name
        ]
        public = [value for value in classes if not value.__name__.startswith("_")]
        if len(public) != 1:
            file = Path(module.__file__ or module_name).name
            raise ConfigError(f"{file} must define one public {self.base.__name__}; it defines {len(public)}")
        return public[0]

    def _import(self, path: str) -> type[T]:
        module_name, _, class_name = path.partition(":")
        if not module_name or not class_name:
            raise ConfigError(f"{self.kind} '{path}': a class is named as package.module:Class")
        try:
            value = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.kind} '{path}': cannot import {module_name} ({error})") from error
        except AttributeError:
            raise ConfigError(f"{self.kind} '{path}': {module_name} has no '{class_name}'") from None
        if not isinstance(value, type):
            raise ConfigError(f"{self.kind} '{path}': {class_name} is a {type(value).__name__}, not a class")
        return cast("type[T]", value)


class NamedRegistry(Registry[T]):
    """One whose modules may hold several entries: every public subclass of the base with a class attribute ``name``."""

    def names(self) -> list[str]:
        return sorted({*self._named(), *self._plugins()})

    def get(self, name: str) -> type[T]:
        named = self._named()
        return named[name] if name in named else super().get(name)

    def _built_in(self) -> dict[str, str]:
        return {name: cls.__module__ for name, cls in self._named().items()}

    def _named(self) -> dict[str, type[T]]:
        classes: dict[str, type[T]] = {}
        for module_name in super()._built_in().values():
            for value in vars(importlib.import_module(module_name)).values():
                if isinstance(value, type) and issubclass(value, self.base) and value.__module__ == module_name:
                    classes[getattr(value, "name", "")] = value
        return classes
