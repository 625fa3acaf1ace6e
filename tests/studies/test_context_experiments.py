"""Context in runs and experiments: recorded, remade for prediction, limited, and folded into figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from manydg.config import TrainingConfig
from manydg.data.context import add_context, limit_context
from manydg.data.dataset import DomainDataset, from_arrays, open_dataset
from manydg.data.info import DatasetInfo
from manydg.data.timeline import ContextOptions
from manydg.errors import ConfigError, DataError
from manydg.evaluation.metrics import read_predictions
from manydg.studies.catalogue import EXPERIMENTS
from manydg.studies.catalogue.context_value import TimeBins, elapsed, scores_by_count, scores_by_elapsed
from manydg.studies.catalogue.embeddings import retrieval_rates, sessions_apart, sessions_of
from manydg.studies.conduct import compare, fitting
from manydg.studies.figure_data import parse_figure
from manydg.studies.records import read_results
from manydg.studies.settings import Options
from manydg.studies.study import Request, Study
from manydg.studies.summary import summarize_folder
from manydg.training import inference
from manydg.training.run import PREDICTIONS, Run, draw_split, open_run, train

# The age of a value that is new in every sample is always 0.
pytestmark = pytest.mark.filterwarnings("ignore:.*constant in the training patients")
SMALL = {"hidden": 64, "layers": 1, "width": 32}


@pytest.fixture(scope="module")
def nights() -> DomainDataset:
    """Two nights of each of 24 people; the label is whether the value is high for that person."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(24), 40)
    usual = rng.normal(size=(24, 3)) * 3
    values = usual[who] + rng.normal(size=(960, 3))
    labels = (values[:, 0] > usual[who, 0]).astype(int)
    times = np.tile(np.r_[np.arange(20), 1000 + np.arange(20)], 24)
    return from_arrays(values, labels, who, times=times, kind="binary", info={"settings": {"session_gap": 100.0}})


@pytest.fixture(scope="module")
def run(nights: DomainDataset) -> Run:
    return trained(nights, algorithm="manydg-context", settings={"contrast": 0.1})


@pytest.mark.parametrize("algorithm", ["arm", "bn-adapt"])
def test_what_adapts_to_a_whole_patient_cannot_promise_not_to_look_ahead(nights: DomainDataset, algorithm: str) -> None:
    with pytest.raises(ConfigError, match=rf"{algorithm} cannot be used with causal context.*later"):
        trained(nights, algorithm=algorithm, context="causal")
    assert trained(nights, algorithm=algorithm, context="offline", epochs=1).record.context["mode"] == "offline"


def test_an_experiment_leaves_out_what_looks_ahead_and_says_why(nights: DomainDataset) -> None:
    said: list[str] = []
    request = Request(nights, Options(TrainingConfig(context="causal")), 1, ("base", "arm"))
    assert fitting(request, said.append).algorithms == ("base",)
    assert "arm is left out" in said[0]
    assert "later" in said[0]


def trained(data: DomainDataset, **options: Any) -> Run:
    settled = {"epochs": 6, "batch_size": 64, "lr": 1e-2, "backbone": "mlp", "backbone_options": SMALL, **options}
    return train(data, TrainingConfig.from_mapping(settled))


def test_the_record_states_the_context_used(nights: DomainDataset, run: Run) -> None:
    assert run.record.context["mode"] == "offline"
    assert trained(nights, algorithm="base", epochs=1).record.context == {"mode": "none"}
    causal = trained(nights, algorithm="base", epochs=1, context="causal", context_options={"strength": 2.0})
    assert (causal.record.context["mode"], causal.record.context["strength"]) == ("causal", 2.0)


def test_context_tells_what_a_value_alone_cannot(nights: DomainDataset, run: Run) -> None:
    without = trained(nights, algorithm="base")
    assert run.record.test["auroc"] > without.record.test["auroc"] + 0.05


def test_a_model_with_context_remakes_it_from_the_samples_it_is_given(nights: DomainDataset, run: Run) -> None:
    part = nights.select(np.arange(80))
    assert np.array_equal(
        run.predict_proba(part), run.predict_proba(add_context(part, strength=run.record.context["strength"]))
    )
    alone = limit_context(part, 0)
    assert not np.allclose(run.predict_proba(part), run.predict_proba(alone))


def test_a_prediction_depends_on_no_other_patient_and_no_label(nights: DomainDataset, run: Run) -> None:
    mine = nights.select(np.arange(40))
    other = dataclasses.replace(nights, targets=nights.targets.flip(0))
    np.testing.assert_allclose(run.predict_proba(mine), run.predict_proba(other)[:40], atol=1e-6)


def test_an_opened_run_predicts_the_same_with_context(nights: DomainDataset, tmp_path: Path) -> None:
    config = TrainingConfig(algorithm="manydg-context", epochs=2, batch_size=64, backbone="mlp", context="causal")
    first = train(nights, config, out=tmp_path / "run")
    assert np.array_equal(first.predict_proba(nights), open_run(tmp_path / "run").predict_proba(nights))


def test_without_context_a_sample_is_predicted_as_well_as_without_the_idea(nights: DomainDataset, run: Run) -> None:
    split_test = nights.subset(nights.patients[:8].tolist())
    by_count = scores_by_count(run, split_test, (0, 5, 39, 40))
    assert sorted(by_count) == [0.0, 5.0, 39.0]
    assert by_count[0.0]["auroc"] > 0.5
    assert by_count[0.0]["auroc"] < by_count[5.0]["auroc"] < by_count[39.0]["auroc"]


def test_pieces_hold_so_many_neighbours_in_time() -> None:
    rng = np.random.default_rng(1)
    who, times = np.repeat([3, 5], [7, 4]), rng.permutation(11)
    data = from_arrays(np.zeros((11, 1)), np.arange(11) % 2, who, times=times)
    pieces = limit_context(data, 2).domains.numpy()
    assert sorted(np.bincount(pieces).tolist()) == [1, 1, 3, 3, 3]
    for piece in np.unique(pieces):
        assert len(set(who[pieces == piece])) == 1
        low, high = times[pieces == piece].min(), times[pieces == piece].max()
        between = (who == who[pieces == piece][0]) & (times >= low) & (times <= high)
        assert np.array_equal(between, pieces == piece)


def test_sessions_and_their_clock_follow_the_gap(nights: DomainDataset) -> None:
    sessions = sessions_of(nights)
    assert sessions is not None
    assert sessions.reshape(24, 2, 20).tolist() == np.tile(np.repeat([0, 1], 20), 24).reshape(24, 2, 20).tolist()
    assert elapsed(nights).max() == 19
    assert sessions_of(dataclasses.replace(nights, info=DatasetInfo())) is None


def test_every_sample_is_scored_in_one_bin_of_time_and_runs_share_the_bins(nights: DomainDataset, run: Run) -> None:
    bins = TimeBins.of(nights, 4)
    # Twenty moments of a night, five in each bin.
    assert bins.medians.tolist() == [2.0, 7.0, 12.0, 17.0]
    found = scores_by_elapsed(run, nights, bins)
    few = scores_by_elapsed(run, nights.select(np.flatnonzero(elapsed(nights) != 3)), bins)
    assert list(found) == list(few) == bins.medians.tolist()
    late = np.flatnonzero(elapsed(nights) >= 15)
    # What a sample of a bin scores is what it scores among all: context is that of the whole night.
    probabilities = run.predict_proba(nights)[late]
    truth = nights.targets.numpy()[late]
    assert found[17.0]["auroc"] == pytest.approx(roc_auc_score(truth, probabilities[:, 1]))


def test_z_finds_the_other_night_of_the_same_person(nights: DomainDataset, run: Run) -> None:
    rates = retrieval_rates(run, nights)
    found = rates["all", "z"]
    assert found.queries == 48
    assert found.chance == pytest.approx(1 / 47)
    assert found.rate > 0.5
    assert {name for _, name in rates} == {"v", "z", "parallel", "orthogonal", "inputs"}


def test_some_people_ask_and_everybody_s_nights_answer(nights: DomainDataset, run: Run) -> None:
    few = (nights.domains < 3).numpy()
    found = retrieval_rates(run, nights, {"few": few})["few", "z"]
    assert found.queries == 6
    assert found.chance == pytest.approx(1 / 47)


def test_one_night_tells_the_probe_nothing_of_the_other(nights: DomainDataset, run: Run) -> None:
    sessions = sessions_of(nights)
    assert sessions is not None
    first = np.flatnonzero(sessions == 0)
    whole = run.prepare(sessions_apart(nights, sessions)).columns["context"]
    alone = run.prepare(nights.select(first)).columns["context"]
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole[torch.from_numpy(first)], alone)


@pytest.mark.parametrize("name", ["cold-start", "patient-probe"])
def test_figures_of_context_experiments_are_such_as_the_report_draws(
    name: str, nights: DomainDataset, tmp_path: Path
) -> None:
    place = nights.save(tmp_path / "data")
    config = TrainingConfig(epochs=1, batch_size=64, backbone="mlp", backbone_options=SMALL)
    request = Request(nights, Options(config), 1, ())
    experiment = EXPERIMENTS.get(name)()
    records = Study(tmp_path / "results", place, experiment.plan(request), "nights", "cpu").execute()
    assert [record.error for record in records if record.status != "ok"] == []
    figures = experiment.aggregate(request, records, tmp_path / "results")
    assert figures
    for figure in figures.values():
        assert parse_figure(figure.to_json()) == figure


def test_the_context_experiment_compares_learners_kinds_and_parts(nights: DomainDataset) -> None:
    request = Request(nights, Options(TrainingConfig()), 2, ())
    runs = EXPERIMENTS.get("context")().plan(request)
    seen = {(run.config.algorithm, run.config.context) for run in runs}
    assert {("boosting", "none"), ("boosting", "causal"), ("base", "offline"), ("manydg-context", "none")} <= seen
    assert any("one direction" in str(run.variant.get("changed")) for run in runs)
    keys = {str(run) for run in runs}
    assert len(keys) == len(runs)


def test_rivals_run_with_and_without_context_and_are_tested_against_ours(nights: DomainDataset, tmp_path: Path) -> None:
    place = nights.save(tmp_path / "data")
    config = TrainingConfig(epochs=1, batch_size=64, backbone="mlp", backbone_options=SMALL, context="causal")
    request = Request(nights, Options(config), 2, ("base", "manydg", "manydg-context"))
    runs = EXPERIMENTS.get("context-rivals")().plan(request)
    Study(tmp_path / "results", place, runs, "nights", "cpu").execute()
    (summary,) = summarize_folder(tmp_path / "results", resamples=20)
    with_context = [f"{name} (causal context)" for name in ("base", "manydg-context", "manydg")]
    assert set(summary.rows) == {"base (no context)", "manydg (no context)", *with_context}
    assert summary.reference == "manydg-context (causal context)"
    assert summary.entries["base (no context)", "auprc"].difference is not None


def made_contexts(monkeypatch: pytest.MonkeyPatch) -> list[ContextOptions]:
    """The options of every context that is made from now on."""
    made: list[ContextOptions] = []
    original = inference.apply_context

    def watching(dataset: DomainDataset, options: ContextOptions, *rest: Any) -> DomainDataset:
        made.append(options)
        return original(dataset, options, *rest)

    monkeypatch.setattr(inference, "apply_context", watching)
    return made


def test_runs_of_one_split_make_their_context_once_and_predict_as_if_alone(
    nights: DomainDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.save(tmp_path / "nights")
    made = made_contexts(monkeypatch)
    options = Options(TrainingConfig(epochs=2, batch_size=64, lr=1e-2, backbone="mlp", context="offline"))
    compare(tmp_path / "nights", ["base", "prototype", "manydg"], 2, tmp_path / "out", options=options, device="cpu")
    assert len(made) == 2  # one for each split
    data = open_dataset(tmp_path / "nights")
    for record in read_results(tmp_path / "out"):
        alone = train(data, record.config, device="cpu")
        file = tmp_path / "out" / str(record.folder) / PREDICTIONS
        ours = read_predictions(file, "test", alone.algorithm.target).probabilities
        test = data.select(draw_split(data, record.config).test)
        np.testing.assert_array_equal(ours, alone.predict_proba(test))


def test_context_is_made_anew_for_other_samples_options_and_training_patients(
    nights: DomainDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, cpu = made_contexts(monkeypatch), torch.device("cpu")
    offline, rows = TrainingConfig(context="offline", context_options={"strength": 2.0}), np.arange(480)
    fewer = nights.select(np.arange(720))
    moved = dataclasses.replace(fewer, times=cast("Tensor", fewer.times) * 2)
    merged = dataclasses.replace(fewer, domains=fewer.domains // 2, patients=fewer.patients[::2])
    other = offline.replace(context_options={"strength": 3.0})
    causal = offline.replace(context="causal")
    # Each differs from the one before it in one thing.
    asked = [(nights, offline, rows), (nights, offline, rows[:240]), (fewer, offline, rows[:240]),
             (merged, offline, rows[:240]), (fewer, offline, rows[:240]), (moved, offline, rows[:240]),
             (moved, other, rows[:240]), (moved, causal, rows[:240])]  # fmt: skip
    with inference.sharing_context(inference.ContextCache()):
        for data, config, training in asked:
            fresh = inference.with_context(data, config, cpu, training=training)
            # Without context in between: what is kept stays.
            assert inference.with_context(data, config.replace(context="none"), cpu) is data
            assert inference.spared_seconds() == 0
            again = inference.with_context(data, config, cpu, training=training)
            assert again.columns["context"] is fresh.columns["context"]
            assert inference.spared_seconds() > 0
    assert len(made) == len(asked)
    assert inference.with_context(nights, offline, cpu) is not inference.with_context(nights, offline, cpu)


def test_context_that_cannot_be_made_is_left_out_or_refused_whatever_was_asked_before() -> None:
    rng, cpu = np.random.default_rng(0), torch.device("cpu")
    signals = from_arrays(rng.normal(size=(60, 2, 64)), np.arange(60) % 2, np.arange(60) // 10, rate=64.0)
    with inference.sharing_context(inference.ContextCache()):
        for algorithm in ("manydg-context", "best"):
            auto = TrainingConfig(algorithm, backbone="mlp")
            assert inference.with_context(signals, auto, cpu) is signals
        with pytest.raises(DataError, match="spectrograms"):
            inference.with_context(signals, auto.replace(context="offline"), cpu)


def test_a_run_is_charged_for_context_that_another_one_made(
    nights: DomainDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainingConfig("base", epochs=1, batch_size=64, backbone="mlp", context="offline")
    with inference.sharing_context(inference.ContextCache()):
        train(nights, config, device="cpu")
        monkeypatch.setattr(inference._cache.get(), "_made", (*inference._cache.get()._made[:2], 1000.0))
        assert train(nights, config.replace(seed=0, lr=2e-3), device="cpu").record.seconds > 1000
