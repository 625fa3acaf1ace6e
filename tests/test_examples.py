"""Every example of the gallery runs as it is and prints what it promises."""

from __future__ import annotations

import gzip
import re
import runpy
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PRINTS = {
    "cluster": r"base: kappa .*\nmanydg: kappa ",
    "context_for_lightgbm": (
        r"LGBMClassifier: AUROC 0\.[56]\d without context, 0\.9\d with it\n"
        r"CatBoostClassifier: AUROC 0\.[56]\d without context, 0\.9\d with it\n.* the same: True"
    ),
    "edf_to_hypnogram": r"kappa on test patients: 0\.[3-9](.*\n)+wrote .*\.csv\nwrote .*-Hypnogram\.edf\nwrote .*\.png",
    "few_labels": r"no label: [67]\d% .*\n5 labels of each patient: 9\d% ",
    "onnx_model": (
        r"model\.onnx: probabilities of 5 samples\n(.*\[0\.\d+.*\n){5}"
        r"one by one with a state of \d+ numbers, or together: the same, True"
    ),
    "own_algorithm": r"base: kappa .*\n__main__:PairDistance: kappa ",
    "own_backbone": r"base: AUROC (0\.[89]|1).*\nmanydg: AUROC (0\.[89]|1)",
    "own_source": r"600 samples of 20 patients.*\nAUROC (0\.9|1)",
    "streaming_context": r"minutes 0 to 2: [4-7]\d%.*\n.*\nminutes 6 to 20: (8|9)\d%",
    "table_to_report": r"base, split 0: AUROC (.*\n)+open .*report\.html",
    "tuning": r"base: trial \d, validation kappa (.*\n)+manydg: kappa .* on test patients",
}
SLOW = {"cluster"}


def _marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.mark.parametrize("name", [_marked(name) for name in PRINTS])
def test_an_example_prints_what_it_promises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(PRINTS[name], printed), printed
    for path in re.findall(r"(?:open|wrote) (\S+)", printed):
        assert Path(path).stat().st_size > 0


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTS, "kidney_table"}


def test_the_table_of_kidney_injury_carries_values_forward_within_a_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hours = [timedelta(hours=hour) for hour in range(3)]
    stays = pl.DataFrame({"stay_id": pl.Series([1, 1, 1, 2, 2, 2], dtype=pl.Int32), "time": hours * 2})
    stays.with_columns(hr=pl.Series([80.0, None, 90.0, None, 70.0, None])).write_parquet(tmp_path / "dyn.parquet")
    stays.with_columns(label=pl.Series([False, False, True, False, False, False])).write_parquet(
        tmp_path / "outc.parquet"
    )
    people = {"age": [60.0, 70.0], "sex": ["Male", "Female"], "height": [180.0, 165.0], "weight": [80.0, 60.0]}
    pl.DataFrame({"stay_id": pl.Series([1, 2], dtype=pl.Int32), **people}).write_parquet(tmp_path / "sta.parquet")
    with gzip.open(tmp_path / "patient.csv.gz", "wt") as file:
        file.write(
            "patientunitstayid,uniquepid,hospitalid,hospitaldischargeyear,patienthealthsystemstayid,unitvisitnumber\n"
            "2,a,73,2015,9,2\n1,a,73,2015,9,1\n"
        )
    out = tmp_path / "kidney.parquet"
    monkeypatch.setattr(sys, "argv", ["kidney_table.py", str(tmp_path), str(tmp_path), str(out)])
    runpy.run_path(str(EXAMPLES / "kidney_table.py"), run_name="__main__")
    table = pl.read_parquet(out)
    assert table["value_hr"].to_list() == [80, 80, 90, None, 70, 70]
    assert table["measured_hr"].to_list() == [1, 0, 1, 0, 1, 0]
    assert table["stay"].to_list() == [1, 1, 1, 2, 2, 2]
    assert "6 hours (1 with injury) of 1 patients" in capsys.readouterr().out
