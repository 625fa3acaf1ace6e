"""Any nn.Module can be a backbone, from Python and by name; mistakes are named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from manydg.backbones import BACKBONES, Backbone, Inputs, as_backbone, build_backbone
from manydg.data.dataset import ColumnSchema, DomainDataset, InputSchema
from manydg.errors import ConfigError

TABLE = InputSchema({"x": ColumnSchema("float32", (5,))})
TWO = InputSchema({"x": ColumnSchema("float32", (5,)), "y": ColumnSchema("float32", (2,))})
RAGGED = InputSchema({"codes": ColumnSchema("int64", (), 1)})

SOURCE = """
import torch
from torch import nn
from manydg.backbones import Backbone


class Plain(nn.Module):
    def __init__(self, width=7):
        super().__init__()
        self.layer = nn.Linear(5, width)

    def forward(self, x):
        return self.layer(x)


class Sized(Plain):
    def __init__(self, width=7):
        super().__init__(width)
        self.output_size = width


class OfSchema(nn.Module):
    def __init__(self, schema):
        super().__init__()
        self.layer = nn.Linear(schema.columns["x"].shape[0], 3)

    def forward(self, x):
        return self.layer(x)


class Several(Backbone):
    output_size = 4

    def __init__(self, schema):
        super().__init__()
        self.layer = nn.Linear(sum(column.shape[0] for column in schema.columns.values()), 4)

    def forward(self, inputs):
        return self.layer(torch.cat(list(inputs.values()), dim=1))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(6)

    def forward(self, x):
        return self.layer(x)


class Demanding(nn.Module):
    def __init__(self, depth):
        super().__init__()


class NoModule:
    pass


def function():
    return nn.Linear(5, 2)
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the folder where the user works."""
    (tmp_path / "my_networks.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "my_networks", raising=False)
    monkeypatch.setattr(BACKBONES, "_trusted", {})
    return "my_networks"


def _build(name: str, schema: InputSchema, options: dict[str, int] | None = None) -> Backbone:
    """A backbone that the user names."""
    BACKBONES.trust(name)
    return build_backbone(name, schema, options)


def test_a_module_that_the_user_did_not_name_is_not_imported(user: str) -> None:
    with pytest.raises(ConfigError, match=f"not imported because a file names it.* --backbone {user}:Plain"):
        build_backbone(f"{user}:Plain", TABLE)
    assert user not in sys.modules
    assert str(Path.cwd()) not in sys.path


@pytest.mark.parametrize(("name", "width"), [("Plain", 7), ("Sized", 7), ("OfSchema", 3), ("Lazy", 6)])
def test_a_module_in_the_working_folder_is_reached_by_name(user: str, name: str, width: int) -> None:
    backbone = _build(f"{user}:{name}", TABLE)
    assert backbone.output_size == width
    assert backbone({"x": torch.randn(4, 5)}).shape == (4, width)


def test_options_reach_the_module(user: str) -> None:
    assert _build(f"{user}:Plain", TABLE, {"width": 11}).output_size == 11


def test_a_backbone_of_ones_own_gets_all_columns(user: str) -> None:
    backbone = _build(f"{user}:Several", TWO)
    assert backbone({"x": torch.randn(3, 5), "y": torch.randn(3, 2)}).shape == (3, 4)


def test_a_module_from_python_is_wrapped_and_left_in_its_mode() -> None:
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    module[1].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    backbone = as_backbone(module, TABLE)
    assert backbone.output_size == 8
    assert module.training
    assert not module[1].training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    features = backbone({"x": torch.randn(4, 5)})
    features.sum().backward()
    assert module[0].weight.grad is not None


def test_a_module_on_whole_numbers_is_asked_with_whole_numbers() -> None:
    module = nn.Sequential(nn.Embedding(10, 4), nn.Flatten())
    assert as_backbone(module, InputSchema({"x": ColumnSchema("int64", (3,))})).output_size == 12


def test_a_backbone_is_taken_as_it_is(make: Callable[[str], DomainDataset]) -> None:
    backbone = build_backbone("mlp", InputSchema.of(make("table")))
    assert as_backbone(backbone, TABLE) is backbone


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Missing", {}, "has no 'Missing'"),
        ("NoModule", {}, "nn.Module"),
        ("function", {}, "not a class"),
        ("Demanding", {}, "depth"),
        ("Plain", {"widht": 3}, "did you mean 'width'"),
    ],
)
def test_mistakes_in_a_name_or_an_option_are_named(user: str, name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _build(f"{user}:{name}", TABLE, options)


@pytest.mark.parametrize("name", ["no_such_package:Net", ":Net", ".relative:Net"])
def test_a_module_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot import|package.module:Class"):
        _build(name, TABLE)


def test_a_misspelt_backbone_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tabular'"):
        build_backbone("tabluar", TABLE)


class _WrongWidth(nn.Linear):
    output_size = 9


class _NoWidth(Backbone):
    def forward(self, inputs: Inputs) -> Tensor:
        return torch.zeros(len(inputs["x"]), 3)


@pytest.mark.parametrize(
    ("module", "schema", "message"),
    [
        (nn.Linear(6, 2), TABLE, "cannot take an input of shape"),
        (nn.Unflatten(1, (5, 1)), TABLE, "must map"),
        (nn.Linear(5, 2), TWO, "takes one tensor"),
        (nn.Linear(5, 2), RAGGED, "differ in length"),
        (_WrongWidth(5, 2), TABLE, "output_size is 9"),
        (_NoWidth(), TABLE, "must set output_size"),
        ("mlp", TABLE, "nn.Module"),
    ],
)
def test_modules_that_do_not_fit_are_refused(module: nn.Module, schema: InputSchema, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_backbone(module, schema)
