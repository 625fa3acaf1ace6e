"""Names to classes: built in, plugged in, or anywhere on the path."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from manydg.algorithms import ALGORITHMS, Algorithm
from manydg.algorithms.manydg import ManyDG
from manydg.backbones import BACKBONES, Backbone
from manydg.errors import ConfigError
from manydg.registry import Registry

PLUGIN = """
from manydg.algorithms.base import Base

class Cautious(Base):
    pass
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real distribution on the path, as pip would leave it: a module and its metadata with an entry point."""
    (tmp_path / "cautious_plugin.py").write_text(PLUGIN)
    metadata = tmp_path / "cautious-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cautious\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[manydg.algorithms]\ncautious = cautious_plugin:Cautious\nbroken = cautious_plugin:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("cautious_plugin", None)


def test_a_file_is_an_entry_under_its_name_with_hyphens() -> None:
    assert {"base", "manydg", "manydg-random-pairs", "prototype"} <= set(ALGORITHMS.names())
    assert not [name for name in ALGORITHMS.names() if name.startswith("_") or "_" in name]
    assert ALGORITHMS.get("manydg") is ManyDG


@pytest.mark.parametrize(("registry", "base"), [(ALGORITHMS, Algorithm), (BACKBONES, Backbone)])
def test_every_entry_is_a_class_of_its_kind(registry: Registry[object], base: type) -> None:
    for name in registry.names():
        assert issubclass(registry.get(name), base)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown algorithm 'manidg': did you mean 'manydg'\? Known: .*base"):
        ALGORITHMS.get("manidg")
    with pytest.raises(ConfigError, match=r"unknown backbone 'mpl': did you mean 'mlp'\?"):
        BACKBONES.get("mpl")
    with pytest.raises(ConfigError, match=r"unknown algorithm 'zzzzzz'\. Known: "):
        ALGORITHMS.get("zzzzzz")


@pytest.mark.usefixtures("plugin")
def test_an_installed_plugin_joins_by_its_entry_point() -> None:
    assert "cautious" in ALGORITHMS.names()
    found = ALGORITHMS.get("cautious")
    assert found.__name__ == "Cautious"
    assert issubclass(found, Algorithm)
    assert "cautious" not in BACKBONES.names()


@pytest.mark.usefixtures("plugin")
def test_a_plugin_whose_class_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cautious_plugin has no 'Nothing'"):
        ALGORITHMS.get("broken")


@pytest.mark.usefixtures("plugin")
def test_any_class_is_reached_by_module_and_name() -> None:
    for registry, name in ((ALGORITHMS, "cautious_plugin:Cautious"), (BACKBONES, "torch.nn:Flatten")):
        registry.trust(name)
        assert registry.get(name).__name__ == name.partition(":")[2]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Thing", "cannot import no_such_module"),
        ("torch.nn:NoSuchLayer", "torch.nn has no 'NoSuchLayer'"),
        ("torch.nn:functional", "functional is a module, not a class"),
        (":Thing", "package.module:Class"),
        ("torch.nn:", "package.module:Class"),
    ],
)
def test_a_wrong_path_is_an_error_that_says_what_is_wrong(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BACKBONES.trust(path)


def test_a_file_with_no_class_or_two_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ideas_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("class Idea:\n    pass\n")
    (package / "one_good.py").write_text(
        "from ideas_of_mine import Idea\n\nclass _Part(Idea):\n    pass\n\nclass Good(Idea):\n    pass\n"
    )
    (package / "none.py").write_text("from ideas_of_mine import Idea\n")
    (package / "two.py").write_text("from ideas_of_mine import Idea\n\nclass A(Idea): ...\n\nclass B(Idea): ...\n")
    (package / "_helper.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    module: types.ModuleType = __import__("ideas_of_mine")
    registry: Registry[object] = Registry("idea", "ideas_of_mine", module.Idea)
    assert registry.names() == ["none", "one-good", "two"]
    assert registry.get("one-good").__name__ == "Good"
    with pytest.raises(ConfigError, match=r"none\.py must define one public Idea; it defines 0"):
        registry.get("none")
    with pytest.raises(ConfigError, match=r"two\.py must define one public Idea; it defines 2"):
        registry.get("two")
