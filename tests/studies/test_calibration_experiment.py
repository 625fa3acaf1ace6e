"""The experiment on calibration, from runs to figures that the report reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.evaluation.metrics import read_predictions
from manydg.studies.catalogue.trustworthiness import COLUMNS, check_promises
from manydg.studies.conduct import conduct, make_request
from manydg.studies.figure_data import CellTable, Curve, read_figures
from manydg.studies.settings import Options
from manydg.training.inference import read_calibration
from manydg.training.run import open_run

QUICK = Options(
    TrainingConfig(epochs=2, batch_size=32, lr=5e-3, ratios=(0.5, 0.3, 0.2), backbone_options={"hidden": 8, "width": 6})
)


@pytest.mark.parametrize("kind", ["classes", "multilabel"])
def test_promises_stand_beside_what_was_kept(
    kind: str, dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    place = dataset_of(kind, patients=40, samples=6).save(tmp_path / "data")
    request = make_request("calibration", place, QUICK, 1, ("base",))
    records = conduct({"calibration": request}, place, tmp_path / "out").records["calibration"]
    figures = {figure.title: figure for figure in read_figures(tmp_path / "out" / "figures")}
    assert {figure.experiment for figure in figures.values()} == {"calibration"}
    table = figures["Promised and kept"].data
    assert isinstance(table, CellTable)
    (row,) = table.rows
    assert len(row) == len(COLUMNS)
    cells = dict(zip(table.columns, row, strict=True))
    folder = tmp_path / "out" / records[0].folder
    rules = read_calibration(folder)
    assert rules is not None
    assert cells["promised coverage"] == pytest.approx(rules.on_average.level)
    judged = check_promises(open_dataset(place), records[0], tmp_path / "out")
    patients = read_predictions(folder / "predictions.npz", "test", open_run(folder).algorithm.target).patients
    assert len(judged.coverage) == len(judged.unlike) == len(np.unique(patients))
    assert cells["coverage"] == pytest.approx(judged.coverage.mean())
    shares = figures["How many of a patient’s prediction sets hold the truth"].data
    assert isinstance(shares, Curve)
    line = [value for value in shares.series[0].mean if value is not None]
    assert len(line) == len(shares.series[0].mean)
    assert line == sorted(line)
    curve = figures["Stated and observed, base"].data
    assert isinstance(curve, Curve)
    assert {one.name for one in curve.series} == {"as given", "calibrated", "ideal"}
