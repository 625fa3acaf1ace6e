"""An event to be foreseen: nothing after its onset is trained on, and scores before and after it are kept apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from manydg.config import DecisionRule, TrainingConfig
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.info import DatasetInfo, EventSpec
from manydg.data.splits import load_split
from manydg.errors import ConfigError, DataError
from manydg.evaluation.clinical import rates_at_threshold, threshold_for
from manydg.evaluation.metrics import Predictions, read_predictions
from manydg.predict import about, predict_samples
from manydg.report import write_report
from manydg.report.card import write_card
from manydg.studies.catalogue import context_value
from manydg.studies.catalogue.audit import audit_run
from manydg.studies.catalogue.embeddings import embedded_sides
from manydg.studies.catalogue.personalisation import Unseen
from manydg.studies.catalogue.trustworthiness import check_promises
from manydg.studies.conduct import compare
from manydg.studies.external import evaluate_run
from manydg.studies.summary import clinical_results, summarize_folder
from manydg.studies.tuning import validation_score
from manydg.training.fit import Silent
from manydg.training.run import draw_split, open_run, train

pytestmark = pytest.mark.filterwarnings("ignore:.*constant in the training")
HOURS, PATIENTS, ONSET, HORIZON = 16, 40, 11.0, 4.0


def stays(*, foresee: bool = True, seed: int = 0) -> DomainDataset:
    """Half of the patients fall ill at hour 11; a value rises before it, and far more from the onset on."""
    rng = np.random.default_rng(seed)
    who, hour = np.repeat(np.arange(PATIENTS), HOURS), np.tile(np.arange(float(HOURS)), PATIENTS)
    onset = np.where(who % 2 == 0, ONSET, np.nan)
    label = (onset - hour <= HORIZON).astype(int)
    values = rng.normal(size=(len(who), 3))
    values[:, 0] += label + 3 * (hour >= onset)
    info = DatasetInfo(event=EventSpec("onset", HORIZON, 24.0, foresee))
    data = from_arrays(values, label, who, times=hour, info=info)
    return replace(data, metadata={"onset": torch.from_numpy(onset)})


def options(**changes: Any) -> TrainingConfig:
    return TrainingConfig(**{"algorithm": "base", "epochs": 2, "lr": 0.01, "batch_size": 64, **changes})


def disturbed(data: DomainDataset) -> DomainDataset:
    """The same with other values and labels from the onset on."""
    assert data.times is not None
    begun = data.times >= data.metadata["onset"]
    column = data.column("x")
    assert isinstance(column, torch.Tensor)
    changed = torch.where(begun[:, None], -50.0 * column - 7.0, column)
    return replace(data, columns={"x": changed}, targets=torch.where(begun, 1 - data.targets, data.targets))


@pytest.mark.parametrize(
    "config",
    [
        options(context="none"),
        options(context="causal"),
        options(algorithm="manydg", context="causal"),
        options(algorithm="manydg-context"),
        options(context="causal", sequence="gru"),
        options(algorithm="boosting", context="causal", settings={"rounds": 5}),
    ],
    ids=["plain", "context", "pairs", "method with context", "sequence", "boosting"],
)
def test_nothing_from_the_onset_on_reaches_training_choice_threshold_or_scores_before_it(
    config: TrainingConfig, tmp_path: Path
) -> None:
    first = train(stays(), config, out=tmp_path / "a", device="cpu")
    other = train(disturbed(stays()), config, out=tmp_path / "b", device="cpu")
    ours, theirs = first.algorithm.state_dict(), other.algorithm.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert [entry.val for entry in first.record.history] == [entry.val for entry in other.record.history]
    assert first.record.threshold == other.record.threshold
    assert first.record.headline == other.record.headline
    assert first.record.per_patient.keys() != {}
    assert (tmp_path / "a/calibration.safetensors").read_bytes() == (
        tmp_path / "b/calibration.safetensors"
    ).read_bytes()
    # They are predicted all the same, and scored apart.
    assert first.record.test["auprc_after"] != other.record.test["auprc_after"]


def test_a_search_of_settings_is_not_shown_them_either() -> None:
    scores = [validation_score(data, options(), "cpu", Silent()) for data in (stays(), disturbed(stays()))]
    assert scores[0] == scores[1]


def whole(folder: Path) -> Predictions:
    run = open_run(folder)
    return read_predictions(folder / "predictions.npz", "test", run.algorithm.target, run.record.threshold)


@pytest.mark.parametrize("foresee", [True, False])
def test_metrics_before_and_after_onset_are_those_of_scikit_learn(foresee: bool, tmp_path: Path) -> None:
    record = train(stays(foresee=foresee), options(), out=tmp_path, device="cpu").record
    run = whole(tmp_path)
    assert run.timing is not None
    begun, truth, scores = run.timing.begun, run.truth, run.probabilities[:, 1]
    negative = truth == 0
    for when, rows in {"before": ~begun, "after": begun | negative}.items():
        assert record.test[f"auprc_{when}"] == pytest.approx(average_precision_score(truth[rows], scores[rows]))
        assert record.test[f"auroc_{when}"] == pytest.approx(roc_auc_score(truth[rows], scores[rows]))
    counted = ~begun if foresee else np.ones(len(truth), bool)
    assert record.test["auprc"] == pytest.approx(average_precision_score(truth[counted], scores[counted]))
    assert record.samples.test == counted.sum()
    assert record.event == EventSpec("onset", HORIZON, 24.0, foresee)
    # What came after is easier to recognise than what comes is to foresee.
    assert float(record.test["auprc_after"] or 0) > float(record.test["auprc_before"] or 0)


def test_a_patient_who_is_ill_from_the_first_sample_is_only_scored_after(tmp_path: Path) -> None:
    data = stays()
    assert data.times is not None
    test = train(data, options(epochs=1), out=tmp_path / "once", device="cpu")
    ill = np.unique(whole(tmp_path / "once").patients)[0]
    code = data.pseudonyms().index(str(ill))
    onset = torch.where(data.domains == code, 0.0, data.metadata["onset"])
    run = train(replace(data, metadata={"onset": onset}), options(epochs=1), out=tmp_path / "again", device="cpu")
    assert len(run.record.per_patient) == len(test.record.per_patient) - 1
    assert len(np.unique(whole(tmp_path / "again").patients)) == len(test.record.per_patient)


@pytest.mark.parametrize(
    "config",
    [options(context="offline"), options(algorithm="bn-adapt"), options(sequence="gru")],
    ids=["offline context", "adapts to all samples", "offline sequence"],
)
def test_what_looks_at_samples_after_the_onset_is_refused(config: TrainingConfig) -> None:
    with pytest.raises(ConfigError, match=r"cannot foresee 'onset': .* onset"):
        train(stays(), config, device="cpu")


@pytest.mark.parametrize("at", ["sensitivity=.9", "precision=.5", "alarms=2/day"])
def test_the_threshold_asked_for_is_chosen_on_validation_patients_kept_with_the_run_and_used_to_predict(
    at: str, tmp_path: Path
) -> None:
    config = options(at=at, silence="2h", ratios=(0.5, 0.25, 0.25))
    run = train(stays(), config, out=tmp_path, device="cpu")
    sides = [read_predictions(tmp_path / "predictions.npz", side, run.algorithm.target) for side in ("val", "test")]
    threshold, words = threshold_for(DecisionRule.parse(at), sides[0], 2.0)
    assert (run.record.threshold, run.record.threshold_rule) == (threshold, words)
    test = replace(sides[1], threshold=threshold)
    rates = rates_at_threshold(test, np.ones((1, len(test.names))), 2.0)
    assert run.record.operating == {name: pytest.approx(float(values[0])) for name, values in rates.items()}
    assert open_run(tmp_path).record.operating == run.record.operating
    decided = predict_samples(open_run(tmp_path), stays()).decisions
    probabilities = run.predict_proba(stays())[:, 1].astype(float)
    assert [name == "1" for name in decided] == (probabilities >= threshold).tolist()
    alarms = np.flatnonzero(predict_samples(open_run(tmp_path), stays()).trust["alarm"])
    assert 0 < len(alarms) < (probabilities >= threshold).sum()
    assert (probabilities[alarms] >= threshold).all()
    same = np.diff(alarms // HOURS) == 0
    assert (np.diff(alarms)[same] >= 2).all()
    words_of_it = about(open_run(tmp_path))["decision"]
    assert isinstance(words_of_it, dict)
    assert words in str(words_of_it["in words"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"at": "alarms=1/day"}, "alarms need an event"), ({"silence": "2h"}, "alarms need an event")],
)
def test_alarms_without_an_event_are_refused_before_any_training(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(replace(stays(), info=DatasetInfo(), metadata={}), options(**changes), device="cpu")


def test_a_threshold_for_several_classes_is_refused_before_any_training() -> None:
    data = from_arrays(np.zeros((12, 2)), np.arange(12) % 3, np.arange(12) // 2)
    with pytest.raises(ConfigError, match=r"'--at precision=.5' is for a binary target, and this one is classes"):
        train(data, options(at="precision=.5"), device="cpu")


def test_a_summary_has_every_metric_after_onset_with_interval_and_test(tmp_path: Path) -> None:
    stays().save(tmp_path / "data")
    compare(tmp_path / "data", ["base", "boosting"], 2, tmp_path / "out", options=options(epochs=1), device="cpu")
    (summary,) = summarize_folder(tmp_path / "out", "base", resamples=50)
    own = ("auprc", "f1", "kappa", "auroc")
    assert summary.metrics == (*own, *(f"{metric}_after" for metric in own))
    entry = summary.entries["boosting", "auprc_after"]
    assert entry.interval is not None
    assert entry.interval.low < entry.mean < entry.interval.high + 1e-9
    assert entry.interval.estimate == pytest.approx(entry.mean)
    assert entry.comparison is not None
    assert "AUPRC after onset" in summary.to_markdown()
    screen = [str(column.header) for column in summary.to_rich(200).columns]
    assert "AUPRC\nafter onset" in screen
    assert not [name for name in screen if name.startswith("F1\n")]


def test_sites_are_drawn_though_a_tested_patient_was_ill_from_the_first_sample(tmp_path: Path) -> None:
    data = stays()
    places = {name: f"site {int(name) // 8}" for name in data.patients.tolist()}
    onset = torch.where(data.domains % 8 == 0, 0.0, data.metadata["onset"])
    replace(data, metadata={"onset": onset}, info=replace(data.info, sites=places)).save(tmp_path / "data")
    by_site = options(epochs=1, split="site", ratios=(0.2, 0.2, 0.6))
    compare(tmp_path / "data", ["base"], 1, tmp_path / "out", options=by_site, device="cpu")
    (summary,) = summarize_folder(tmp_path / "out", resamples=20)
    assert "intervals draw the 3 tested sites first, then patients within them" in summary.notes


def test_silence_is_in_each_datasets_own_unit_of_time(tmp_path: Path) -> None:
    """The same patients with clocks that count hours and days."""
    hours = stays()
    assert hours.times is not None
    onset, event = {"onset": hours.metadata["onset"] / 24}, EventSpec("onset", HORIZON / 24, 1.0, foresee=True)
    days = replace(hours, times=hours.times / 24, metadata=onset, info=replace(hours.info, event=event))
    for name, data in (("hours", hours), ("days", days)):
        data.save(tmp_path / name)
        compare(tmp_path / name, ["base"], 1, tmp_path / "out", options=options(), device="cpu")
    results = clinical_results(tmp_path / "out", silence="3h", resamples=20)
    alarms = {name: result.at_threshold["false_alarms_per_day"].estimate for name, result in results.items()}
    assert 0 < alarms["base on hours"] == pytest.approx(alarms["base on days"])


def test_experiments_on_finished_runs_judge_nothing_from_the_onset_on(tmp_path: Path) -> None:
    data, run_folder = stays(), tmp_path / "runs" / "one"
    record = train(data, options(), out=run_folder, device="cpu").record.replace(folder="runs/one")
    run, part = context_value.tested_part(data, record, tmp_path)
    counted = record.samples.test
    assert counted < len(part)
    assert check_promises(data, record, tmp_path).before.counts.sum() == counted
    assert context_value.scores_by_count(run, part, (0,))[0.0] == pytest.approx(dict(record.headline))
    audit = audit_run(run, data, load_split(run_folder / "split.json", data))
    assert audit.score == pytest.approx(record.test["auprc"])
    assert len(Unseen.of(run, part).truth) == counted
    assert sum(len(one.labels) for one in embedded_sides(data, [record], tmp_path, ("test",))) == counted


def test_a_model_elsewhere_is_not_judged_by_what_came_after_the_onset(tmp_path: Path) -> None:
    train(stays(), options(), out=tmp_path / "run", device="cpu")
    run, there = open_run(tmp_path / "run"), stays(seed=1)
    there = replace(there, patients=np.array([f"new {name}" for name in there.patients]), stored_hash=None)
    whole, before = (evaluate_run(run, data, "there", resamples=20) for data in (there, there.scored()))
    assert whole.strange == before.strange
    assert whole.to_json() == before.to_json()


@pytest.mark.parametrize("foresee", [True, False])
def test_a_split_that_tests_nobody_before_an_onset_does_not_cost_the_comparison(foresee: bool, tmp_path: Path) -> None:
    """Everyone tested in the first split is ill from the first hour on: its scores before onset are undefined."""
    data = stays(foresee=foresee)
    ill = np.isin(data.domains.numpy(), np.unique(data.domains.numpy()[draw_split(data, options()).test]))
    onset = torch.where(torch.from_numpy(ill), 0.0, data.metadata["onset"])
    replace(data, metadata={"onset": onset}).save(tmp_path / "data")
    records = compare(tmp_path / "data", ["base", "boosting"], 2, tmp_path / "out", options=options(), device="cpu")
    before = "auprc" if foresee else "auprc_before"
    assert [record.test[before] is None for record in records] == [True, True, False, False]
    (summary,) = summarize_folder(tmp_path / "out")
    entry = summary.entries["base", before]
    assert entry.mean == records[2].test[before]
    assert entry.interval is not None
    assert entry.interval.low <= entry.mean <= entry.interval.high
    assert set(clinical_results(tmp_path / "out")) == {"base", "boosting"}
    if foresee:
        with pytest.raises(DataError, match="no predictions of a finished run on samples that count"):
            clinical_results(tmp_path / "out" / records[0].folder)
    write_report(tmp_path / "out", tmp_path / "page.html")
    write_card(tmp_path / "out" / records[0].folder, tmp_path / "card.html")
