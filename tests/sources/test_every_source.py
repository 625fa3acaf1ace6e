"""What holds for every source: one home for its name, options with help, and its rows in the docs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

import pytest

from manydg.data.storage import read_description
from manydg.errors import ConfigError, DataError
from manydg.sources import (
    SOURCES,
    TWINS,
    NewSamples,
    Options,
    TrainedOn,
    find_source,
    find_twin,
    is_synthetic,
    mark_synthetic,
    option_help,
    prepare,
    recognize,
    synthesize,
)
from tools import source_tables

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "manydg"
CLINICAL = ("eicu", "iiic", "meds", "mimic3", "mimic4", "sleep-edf")


@cache
def strings_and_imports(file: Path) -> tuple[str, ...]:
    """Every string in a module that is no docstring, and every module it imports."""
    return tuple(_strings_and_imports(file))


def _strings_and_imports(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("manydg"):
            yield from (f"import of {node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("name", CLINICAL)
def test_a_sources_name_stands_in_its_own_file_and_its_twins_and_nowhere_else(name: str) -> None:
    module = name.replace("-", "_")
    own = {PACKAGE / folder / f"{module}.py" for folder in ("sources", "synthetic")}
    word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])|manydg\.(sources|synthetic)\.{module}\b")
    others = [
        f"{file.relative_to(PACKAGE)}: {text[:80]}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file not in own
        for text in strings_and_imports(file)
        if word.search(text)
    ]
    assert others == []


@pytest.mark.parametrize("name", SOURCES.names())
def test_every_source_describes_itself_and_its_options(name: str) -> None:
    source = find_source(name)
    assert source.name == name
    assert source.docs is not None
    assert SOURCES.summary(name)
    for options in (source.options_class, source.prediction_options_class):
        assert issubclass(options, Options)
        assert all(option_help(entry).help.endswith(".") for entry in fields(options))
    assert all(entry.default is not MISSING for entry in fields(source.prediction_options_class))


@pytest.mark.parametrize("name", TWINS.names())
def test_every_twin_has_the_name_of_a_source_and_is_recognised_as_it(name: str, tmp_path: Path) -> None:
    twin = find_twin(name)
    assert twin.name == name
    assert name in SOURCES.names()
    raw = find_source(name).synthesize(tmp_path / "raw", patients=2)
    source = recognize(raw)
    assert source is not None
    assert source.name == name
    assert recognize(tmp_path) is None


PREPARING: dict[str, dict[str, object]] = {
    "mimic3": {"ndc_map": "raw/ndc_to_atc.csv"},
    "mimic4": {"task": "drugs", "ndc_map": "raw/ndc_to_atc.csv"},
    "meds": {"labels": "raw/labels/readmission.parquet"},
}


@pytest.mark.parametrize("name", TWINS.names())
def test_a_dataset_prepared_from_a_twin_says_that_it_is_synthetic(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = synthesize(name, tmp_path / "raw", patients=12, **({"hours": 0.25} if name == "sleep-edf" else {}))
    given = PREPARING.get(name, {})
    options = {key: str(tmp_path / str(value)) if "/" in str(value) else value for key, value in given.items()}
    prepared = read_description(prepare(name, raw, tmp_path / "data", **options)).info
    assert prepared.synthetic
    assert prepared.to_json()["provenance"]["synthetic"] is True  # type: ignore[index, call-overload]
    # Without the mark nothing is claimed, as with real files.
    (raw / "synthetic.json").unlink()
    assert not read_description(prepare(name, raw, tmp_path / "unmarked", **options)).info.synthetic


def test_the_mark_counts_for_files_and_folders_below_it_and_for_folders_above(tmp_path: Path) -> None:
    inside = tmp_path / "study" / "twin" / "part"
    inside.mkdir(parents=True)
    (inside / "a.csv").write_text("x")
    assert not any(is_synthetic(path) for path in (inside, inside / "a.csv", inside.parent, inside.parent.parent))
    mark_synthetic(inside.parent)
    assert all(is_synthetic(path) for path in (inside, inside / "a.csv", inside.parent, inside.parent.parent))
    assert not is_synthetic(tmp_path / "elsewhere.csv")


@pytest.mark.parametrize("name", SOURCES.names())
def test_a_model_of_other_data_is_refused(name: str, tmp_path: Path) -> None:
    source = find_source(name)
    with pytest.raises(DataError, match=f"trained on another data; these are {name} files"):
        list[NewSamples](source.for_prediction(tmp_path, TrainedOn("another"), source.prediction_options_class()))


def test_options_are_checked_by_name_and_completeness(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'min_votes'"):
        prepare("iiic", tmp_path, tmp_path / "out", min_vote=3)
    with pytest.raises(ConfigError, match="the option labels is needed"):
        prepare("meds", tmp_path, tmp_path / "out")


@pytest.mark.parametrize("page", source_tables.PAGES)
def test_the_docs_tables_are_written_from_the_sources(page: str) -> None:
    text = (source_tables.ROOT / page).read_text(encoding="utf-8")
    assert source_tables.replaced(text, source_tables.PAGES[page]()) == text, "run: python -m tools.source_tables"
    assert source_tables.END in text
