"""Names that a stranger chose: what they may do to a terminal, a spreadsheet, a picture and a set of classes."""

from __future__ import annotations

import ast
import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import manydg
from manydg.data.dataset import from_arrays
from manydg.files import csv_text, printable
from manydg.predict import joined_names
from manydg.sources.edf import plot_hypnogram
from manydg.sources.sleep_edf import epoch_table
from manydg.studies.catalogue import EXPERIMENTS

NAMES = ["=1+1", "@SUM(A1)|x", "[red]$a$ \x1b[31m$b\n\u202ec", "-5"]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose names of classes, columns and patients are attacks."""
    folder = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(30), 8)
    label = rng.integers(0, 4, len(who))
    frame = pl.DataFrame(
        {
            "=who\x1b[2J": [f"@p{number}\x1b[1m" for number in who],
            "[bold]f1\x1b[31m": label + rng.normal(size=len(who)) * 0.3,
            "f2": rng.normal(size=len(who)),
            "label": np.array(NAMES)[label],
        }
    )
    frame.write_csv(folder / "table.csv")
    return folder


def lines_of(commands: Any, *arguments: object) -> str:
    code, out, err = commands.run(*arguments)
    assert code == 0, err
    text = str(out + err)
    assert CONTROL.search(text) is None, repr(text)
    return text


def test_names_of_strangers_do_nothing_to_terminals_and_spreadsheets(commands: Any, hostile: Path) -> None:
    raw, data, run, out = (hostile / name for name in ("table.csv", "[red]data\x1b[31m", "run", "predicted"))
    columns = ("--patient", "=who\x1b[2J", "--target", "label", "--features", "*f1*", "f2")
    text = lines_of(commands, "prepare", "table", raw, *columns, "--out", data)
    assert "[red]data\\x1b[31m" in text
    text = lines_of(commands, "inspect", data)
    assert "[red]$a$ \\x1b[31m$b\\n\\u202ec" in text
    small = ("--epochs", 1, "--algorithm", "base", "--device", "cpu")
    lines_of(commands, "train", data, "--out", run, *small)
    lines_of(commands, "predict", run, raw, "--out", out)
    with (out / "predictions.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert not any(cell.startswith(("=", "@", "+", "\t", "\r")) for row in [head, *rows] for cell in row)
    cells = set(pl.read_csv(out / "predictions.csv", infer_schema=False)["predicted"])
    assert cells <= {"'=1+1", "'@SUM(A1)|x", NAMES[2], "-5"}
    assert "'=1+1" in cells
    columns_told = json.loads((out / "about.json").read_text())["columns"]
    assert "apostrophe" in columns_told["any text"]


def test_a_study_of_a_dataset_with_a_hostile_name_prints_plain_lines(commands: Any, hostile: Path) -> None:
    rng = np.random.default_rng(0)
    data = from_arrays(rng.normal(size=(240, 3)), np.array(NAMES)[np.arange(240) % 4], np.arange(240) // 8)
    data.save(hostile / "=[red]d\x1b[31m")
    few = ("--algorithms", "base,prototype", "--seeds", 1, "--epochs", 1, "--device", "cpu")
    for more in (["--dry-run"], []):
        text = lines_of(commands, "compare", hostile / "=[red]d\x1b[31m", "--out", hostile / "study", *few, *more)
        assert "=[red]d\\x1b[31m" in text
    table = pl.read_csv(hostile / "study" / "summary.csv")
    assert set(table["dataset"]) == {"'=[red]d\x1b[31m"}
    assert table["mean"].dtype == pl.Float64
    lines_of(commands, "report", hostile / "study", "--out", hostile / "report.html")


def test_an_error_shows_control_characters_as_escapes(commands: Any, tmp_path: Path) -> None:
    code, out, err = commands.run("inspect", tmp_path / "no\x1b]0;title\x07\x9b31m")
    assert (code, out) == (2, "")
    assert CONTROL.search(err) is None
    assert "no\\x1b]0;title\\x07\\x9b31m" in err


@given(st.text())
def test_printable_text_has_no_character_that_a_terminal_acts_on(text: str) -> None:
    assert CONTROL.search(printable(text)) is None
    assert "\n" not in printable(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_stay_numbers_in_spreadsheets(value: float) -> None:
    assert csv_text(repr(value)) == repr(value)


def read_set(cell: str) -> list[str]:
    """What docs/datasets.md says of a set, read back."""
    return [re.sub(r"\\(.)", r"\1", name) for name in re.findall(r"(?:^|\|)((?:[^|\\]|\\.)*)", cell, re.DOTALL)]


@given(st.lists(st.text(alphabet="a|\\ "), min_size=1, unique=True))
def test_a_set_is_read_back_whatever_its_names_are(names: list[str]) -> None:
    assert read_set(joined_names(names)) == names


def test_names_with_dollars_are_drawn_as_they_are(tmp_path: Path) -> None:
    names, shares = ["$a_$", "W $x^$ $", "N1"], np.full((4, 3), 1 / 3)
    plot_hypnogram(tmp_path / "night.png", names, shares, "night $_$", 30.0)
    assert (tmp_path / "night.png").read_bytes().startswith(b"\x89PNG")
    text = epoch_table(["=W", "N1"], np.array([[0.9, 0.1]]), 30.0, {"set_90": ["=W|N1"]})
    assert text.splitlines()[1] == "0,0,'=W,0.900000,0.100000,'=W|N1"


def test_every_line_of_a_command_goes_through_one_helper() -> None:
    source = Path(manydg.__file__).parent
    bare = []
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            escaped = bool(node.args) and ast.unparse(node.args[0]).startswith(("printable(", "shown(", "dumps("))
            constant = bool(node.args) and isinstance(node.args[0], ast.Constant)
            if name in ("Console", "rich.print") or (name in ("print", "typer.echo") and not escaped and not constant):
                bare.append(f"{file.relative_to(source)}:{node.lineno}")
    # Click's own text for a command without arguments, and the progress bar, whose titles are the program's.
    assert [line.partition(":")[0] for line in sorted(bare)] == ["cli/__init__.py", "sources/_preparing.py"]


def test_the_version_and_the_help_have_their_usual_names(commands: Any) -> None:
    code, out, _ = commands.run("--version")
    assert (code, out.strip()) == (0, f"manydg {manydg.__version__}")
    for arguments in (["-h"], ["train", "-h"], ["prepare", "table", "-h"], ["predict", "-h"]):
        code, out, _ = commands.run(*arguments)
        assert code == 0
        assert "Usage: manydg" in out
    assert "--install-completion" in commands.run("--help")[1]


def test_help_lists_every_experiment(commands: Any) -> None:
    code, out, _ = commands.run("experiment", "--help")
    listed = {line.split()[0] for line in out[out.index("Experiments:") :].splitlines()[1:] if line.startswith("  ")}
    assert code == 0
    assert set(EXPERIMENTS.names()) <= listed


def test_quiet_commands_print_results_alone_and_json_is_json(commands: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    who, x = np.repeat(np.arange(20), 6), rng.normal(size=120)
    frame = pl.DataFrame({"who": who, "x": x, "y": (x + rng.normal(size=120) > 0).astype(int)})
    frame.write_csv(tmp_path / "t.csv")
    table = ("prepare", "table", tmp_path / "t.csv", "--patient", "who", "--target", "y", "--features", "x")
    code, out, err = commands.run("-q", *table, "--out", tmp_path / "data", "--json")
    assert (code, err) == (0, "")
    prepared = json.loads(out)
    assert (prepared["samples"], prepared["patients"], prepared["inputs"]) == (120, 20, {"x": [1]})
    train = ("train", tmp_path / "data", "--algorithm", "base", "--epochs", 1)
    code, out, err = commands.run("--quiet", *train, "--out", tmp_path / "run")
    assert code == 0
    assert "training base" not in err
    assert "unseen patients" in out
    code, out, err = commands.run(*train, "--out", tmp_path / "run", "--json")
    assert json.loads(out)["algorithm"] == "base", "a finished run is reported again"
    code, out, _ = commands.run("predict", tmp_path / "run", tmp_path / "t.csv", "--out", tmp_path / "p", "--json")
    assert code == 0
    assert json.loads(out)["files"] == [str(tmp_path / "p" / "predictions.csv")]
    compare = ("compare", tmp_path / "data", "--algorithms", "base", "--seeds", 2, "--epochs", 1)
    code, out, _ = commands.run(*compare, "--out", tmp_path / "results", "--dry-run")
    assert (code, (tmp_path / "results").exists()) == (0, False), "a dry run writes nothing"
    assert out.count("base") >= 2, "every run is listed"
    tune = ("tune", tmp_path / "data", "--algorithms", "base,boosting", "--seeds", 2, "--trials", 3)
    code, out, _ = commands.run(*tune, "--out", tmp_path / "searches", "--dry-run")
    assert (code, (tmp_path / "searches").exists()) == (0, False)
    assert "base: splits 0 to 1, 3 trials each: base.hidden 8 to 128, training.batch_size" in out
    assert "12 trials; nothing was written" in out
    code, out, _ = commands.run("synthesize", "meds", "--patients", 3, "--out", tmp_path / "meds", "--json")
    assert json.loads(out)["out"] == str(tmp_path / "meds")
    code, out, _ = commands.run(*compare, "--out", tmp_path / "results", "--json")
    (summary,) = json.loads(out)
    assert {(entry["row"], entry["metric"]) for entry in summary["entries"]} >= {("base", "auroc")}


@pytest.mark.parametrize(
    "command",
    ["demo", "paper", "report", "show", "train", "compare", "predict", "inspect", "tune", "experiment", "checklist",
     "card", "export", "audit", "evaluate", "personalise", "clinical", "prepare table", "synthesize meds"],
)  # fmt: skip
def test_every_command_that_reports_can_do_so_as_json(command: str, commands: Any) -> None:
    code, out, _ = commands.run(*command.split(), "--help")
    assert code == 0
    assert "--json" in out


def test_settings_and_lists_are_shown_as_json(commands: Any) -> None:
    code, out, _ = commands.run("show", "manydg", "--json")
    assert code == 0
    assert json.loads(out)["algorithms"]["manydg"]["reconstruction"] == 1.0
    names = json.loads(commands.run("show", "--json")[1])
    assert set(names) == {"presets", "algorithms", "backbones"}
    assert "manydg" in names["algorithms"]
