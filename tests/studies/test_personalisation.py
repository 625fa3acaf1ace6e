"""The study of a few labels: what is shown is not scored, and no other label of an unseen patient enters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.splits import load_split
from manydg.studies.catalogue.personalisation import EARLIER, PROTOCOLS, Personalise, Unseen, evaluate
from manydg.studies.figure_data import parse_figure
from manydg.studies.settings import Options
from manydg.studies.study import Request, Study
from manydg.training.run import open_run


def people() -> DomainDataset:
    rng = np.random.default_rng(0)
    who, hours = np.repeat(np.arange(30), 26), np.tile(np.arange(26.0), 30)
    x = rng.normal(size=(len(who), 3))
    return from_arrays(x, (x[:, 0] + 2 * rng.normal(size=30)[who] > 0).astype(int), who, times=hours)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Request, Path]:
    folder = tmp_path_factory.mktemp("study")
    data = people()
    data.save(folder / "data")
    options = Options(TrainingConfig(epochs=2, lr=1e-2, backbone="mlp", ratios=(0.5, 0.25, 0.25)))
    return Request(data, options, 1, ("base",), label_delay=2.0), folder


def test_what_is_shown_is_not_scored_and_no_other_label_enters(study: tuple[Request, Path]) -> None:
    request, folder = study
    experiment = Personalise()
    records = Study(folder / "out", folder / "data", experiment.plan(request), "people", "cpu").execute(1)
    run = open_run(folder / "out" / records[0].folder)
    rows = load_split(folder / "out" / records[0].folder / "split.json", request.dataset).test
    unseen = Unseen.of(run, request.dataset.select(np.asarray(rows)))
    rng, fewest = np.random.default_rng(0), {}
    for protocol in PROTOCOLS:
        shown = protocol.shown(unseen.outputs, unseen.patients, 0)
        if protocol.online:
            continue
        hidden = np.setdiff1d(np.arange(len(unseen.patients)), shown)
        fewest[protocol.name] = len(shown)
        if protocol.drawn == "first":
            assert unseen.outputs.times[shown].max() < protocol.count
        exchanged = unseen.indicators.copy()
        exchanged[hidden] = exchanged[rng.permutation(hidden)]
        other = dataclasses.replace(unseen, indicators=exchanged)
        for learner in protocol.learners:
            ours, theirs = (one.personal(shown, learner, causal=False) for one in (unseen, other))
            np.testing.assert_array_equal(ours, theirs)
    assert fewest["train_and_target_labeled_first_5"] == 5 * len(np.unique(unseen.patients))
    for gain in evaluate(unseen, 0):
        if not gain.protocol.online:
            count = len(unseen.patients) - fewest[gain.protocol.name]
            assert len(gain.shown[0].truth) == len(gain.without[0].truth) == count
    # Of 26 samples a patient, the six that 20 labels leave are too few to score.
    counts = {gain.protocol.count for gain in evaluate(unseen, 0) if gain.protocol.drawn == "drawn"}
    assert {5, 10} <= counts
    assert not counts & {20, 50, 100}


def test_labels_of_earlier_samples_reach_a_sample_only_when_they_are_known(study: tuple[Request, Path]) -> None:
    request, folder = study
    records = Study(folder / "out", folder / "data", Personalise().plan(request), "people", "cpu").execute(1)
    figures = Personalise().aggregate(request, records, folder / "out")
    assert set(figures) == {"personalise", "personalise-first", "personalise-drawn", "personalise-spread"}
    table = parse_figure(figures["personalise"].to_json()).data
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]  # type: ignore[union-attr]
    earlier = [row for row in rows if row["protocol"] == EARLIER.name]
    assert {row["shown of the patient"] for row in earlier} == {"the labels of all earlier samples, known after 2"}
    assert {row["method"] for row in earlier} == {"base (labels of earlier samples known)"}
    assert {row["method"] for row in rows if row["labels"]} == {"base (some labels of the patient known)"}
    best = {row["learner"]: row["change"] for row in earlier}
    assert best["effects"] > 0.1
    unlabelled = {row["learner"]: row["shown of the patient"] for row in rows if "unlabeled" in str(row["protocol"])}
    assert unlabelled == {"markov": "all samples, without labels", "shares": "20% of the samples, without labels"}
    assert [row["labels"] for row in rows if row["learner"] == "auto" and "drawn" in str(row["protocol"])] == [1, 5, 10]
    for row in rows:
        # The change is by the labels alone: what a learner makes of samples without labels is told apart from it.
        assert row["change"] == pytest.approx(row["shown"] - row["no labels"], abs=1e-6)
        if row["learner"] not in ("markov", "auto"):
            assert row["no labels"] == row["model alone"]
    assert "(interval below 0): in " in figures["personalise"].note
    curve = figures["personalise-drawn"].data
    assert curve.x.values == [0, 1, 5, 10]  # type: ignore[union-attr]
