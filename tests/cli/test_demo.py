"""The demonstration: its table beside what is possible on patients whose truth is known, and its report."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manydg.synthetic import NOISE, DemoPatients


@pytest.fixture(scope="module")
def made() -> DemoPatients:
    return DemoPatients.draw(patients=120, samples=40, seed=3)


def agreement(made: DemoPatients, *, knowing: bool) -> float:
    truth = made.label[made.is_new[made.patient]]
    return float((made.best_possible(knowing_the_patient=knowing).argmax(axis=1) == truth).mean())


def test_knowing_the_patient_raises_what_is_possible(made: DemoPatients) -> None:
    assert agreement(made, knowing=True) > agreement(made, knowing=False) + 0.03


@pytest.mark.parametrize("knowing", [True, False])
def test_the_best_rule_is_calibrated_as_only_the_true_probabilities_are(made: DemoPatients, knowing: bool) -> None:
    probabilities = made.best_possible(knowing_the_patient=knowing)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    # Whoever knows the truth is right as often as they say, to within chance over 1,200 samples of 30 patients.
    assert probabilities.max(axis=1).mean() == pytest.approx(agreement(made, knowing=knowing), abs=0.03)


def test_samples_given_patient_and_class_have_the_mean_and_the_noise_that_the_rule_assumes(made: DemoPatients) -> None:
    expected = made.pattern[made.label] + np.einsum("nl,nls->ns", made.factor[made.patient], made.effect[made.label])
    rest = made.signal - expected
    assert abs(rest.mean()) < 0.02
    assert rest.std() == pytest.approx(NOISE, rel=0.02)


def test_the_demonstration_says_what_its_table_means_and_writes_the_report(commands: Any, tmp_path: Path) -> None:
    made = DemoPatients.draw(patients=24, samples=8)
    made.dataset().save(tmp_path / "others")
    # A folder may hold other results too.
    before = ("--algorithms", "base", "--seeds", 1, "--epochs", 1, "--device", "cpu", "--out", tmp_path / "demo")
    assert commands.run("compare", tmp_path / "others", *before)[0] == 0
    options = ("--patients", 24, "--seeds", 1, "--epochs", 1, "--workers", 1, "--device", "cpu")
    code, out, err = commands.run("demo", "--out", tmp_path / "demo", *options)
    assert code == 0, err
    text = " ".join(out.split())
    for learner in ("base", "boosting", "manydg"):
        assert f"{learner} (no context)" in text
        assert f"{learner} (offline context)" in text
    alone, known = map(float, re.findall(r"the best possible rule reaches (0\.\d{3})", text))
    assert alone <= known
    assert "best learner that is shown the patient's other unlabelled samples" in text
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert "<h1>Synthetic data: " in page
    rows = csv.DictReader((tmp_path / "demo" / "summary.csv").open(encoding="utf-8"))
    kappa = {row["row"]: float(row["mean"]) for row in rows if row["metric"] == "kappa"}
    expected = re.search(r"Expected kappa on new synthetic patients: (\d\.\d{3})", page)
    assert expected is not None
    assert float(expected.group(1)) in [round(mean, 3) for mean in kappa.values()]
