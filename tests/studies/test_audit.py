"""The audit of a run: patients that can be recognised are, noise is not, and erasing takes it away."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.splits import load_split
from manydg.evaluation.probes import identify_samples, identify_sessions
from manydg.report.sections.representation import Representation
from manydg.studies.catalogue.audit import Audit, IdentityAudit, audit_run
from manydg.studies.figure_data import parse_figure
from manydg.studies.settings import Options
from manydg.studies.study import Request, Study
from manydg.training.run import Run, train

PATIENTS, NIGHT = 40, 20


def people(own: float) -> DomainDataset:
    """Two nights a person; inputs hold the label and, times ``own``, what is the person's."""
    rng = np.random.default_rng(0)
    who, hour = np.repeat(np.arange(PATIENTS), 2 * NIGHT), np.tile(np.arange(2 * NIGHT), PATIENTS)
    labels = rng.integers(0, 2, len(who))
    values = rng.normal(size=(len(who), 6)) + own * rng.normal(size=(PATIENTS, 6))[who]
    values[:, 0] += 2 * labels
    times = np.where(hour < NIGHT, hour, hour + 1000).astype(float)
    info: Any = {"settings": {"session_gap": 500.0}}
    return from_arrays(values, labels, who, times=times, info=info)


def run_on(data: DomainDataset, folder: Path, **options: Any) -> Run:
    config = TrainingConfig("base", backbone="mlp", backbone_options={"hidden": 32, "width": 32}, epochs=4, lr=1e-2)
    return train(data, config.replace(**{"ratios": (0.5, 0.25, 0.25), **options}), out=folder, device="cpu")


@pytest.fixture(scope="module")
def recognisable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, DomainDataset, Audit]:
    folder = tmp_path_factory.mktemp("audit")
    data = people(2.0)
    data.save(folder / "data")
    run = run_on(data, folder / "run", algorithm="manydg")
    return run, data, audit_run(run, data, load_split(folder / "run" / "split.json", data))


def test_a_patients_own_direction_is_recognised_and_noise_is_not() -> None:
    rng = np.random.default_rng(1)
    patients, sessions = np.repeat(np.arange(12), 20), np.tile(np.repeat([0, 1], 10), 12)
    noise = rng.normal(size=(240, 5))
    for identify, chance in ((identify_sessions, 1 / 23), (identify_samples, 1 / 12)):
        known = identify(noise + 9 * rng.normal(size=(12, 5))[patients], patients, sessions)
        assert known.rate == 1.0
        assert known.p == 0.001
        unknown = identify(noise, patients, sessions)
        assert not unknown.above_chance
        assert abs(unknown.chance - chance) < 0.01
        assert np.isnan(identify(noise, patients, np.zeros(240)).rate)


def test_exchanged_owners_are_recognised_as_often_as_chance_says() -> None:
    rng = np.random.default_rng(2)
    ps = []
    for _ in range(40):
        values, patients = rng.normal(size=(80, 4)), np.repeat(np.arange(8), 10)
        ps.append(identify_samples(values, patients, np.tile(np.repeat([0, 1], 5), 8)).p)
    assert np.mean(np.array(ps) < 0.05) <= 0.15


def test_unseen_patients_are_recognised_by_features_that_hold_them(
    recognisable: tuple[Run, DomainDataset, Audit],
) -> None:
    run, _, audit = recognisable
    found = {(entry.side, entry.space): entry for entry in audit.identified}
    assert set(found) == {(side, space) for side in ("train", "unseen") for space in ("v", "z", "logits")}
    assert found["unseen", "v"].samples.above_chance
    assert found["unseen", "v"].samples.patients == 20
    assert audit.score == pytest.approx(run.record.test[audit.metric])
    assert any("can be recognised by its features v" in sentence for sentence in audit.words)


def test_erasing_takes_the_patient_out_of_v_and_leaves_the_model_as_it_was(
    recognisable: tuple[Run, DomainDataset, Audit],
) -> None:
    run, data, audit = recognisable
    before = next(entry for entry in audit.identified if (entry.side, entry.space) == ("unseen", "v")).samples.rate
    after = [entry.samples.rate for entry in audit.erased]
    assert [entry.directions for entry in audit.erased] == [1, 4, 16]
    assert after[-1] < 0.9 * before
    predictions = run.predict_proba(data)
    assert not run.algorithm.backbone._forward_hooks
    np.testing.assert_array_equal(run.predict_proba(data), predictions)


def test_patients_who_do_not_differ_are_not_recognised(tmp_path: Path) -> None:
    data = people(0.0)
    run = run_on(data, tmp_path / "run")
    audit = audit_run(run, data, load_split(tmp_path / "run" / "split.json", data))
    unseen = [entry.samples.above_chance for entry in audit.identified if entry.side == "unseen"]
    assert unseen == [False, False]


def test_two_test_patients_are_called_too_few_and_no_interval_is_printed(tmp_path: Path) -> None:
    data = people(2.0)
    run = run_on(data, tmp_path / "run", ratios=(0.9, 0.05, 0.05))
    words = audit_run(run, data, load_split(tmp_path / "run" / "split.json", data)).words
    assert not any("nan" in sentence for sentence in words)
    assert words[-1] == "Fewer than three test patients: too few to say whether the score depends on them."


def test_a_score_that_does_not_exist_is_not_said_to_be_of_too_few_patients(tmp_path: Path) -> None:
    data = people(2.0)
    run = run_on(data, tmp_path / "run", epochs=1)
    split = load_split(tmp_path / "run" / "split.json", data)
    targets = data.targets.clone()
    targets[torch.as_tensor(split.test)] = 0
    words = audit_run(run, replace(data, targets=targets), split).words
    assert not any("nan" in sentence for sentence in words)
    assert words[-1] == "auprc does not exist for the test patients, so that nothing can be said of what it depends on."


def test_a_sequence_model_trees_two_networks_and_several_learners_are_audited(tmp_path: Path) -> None:
    data = people(2.0)
    options = {"sequence": "gru", "sequence_options": {"crop": 8, "width": 16}}
    kinds: list[tuple[str, dict[str, Any], int]] = [
        ("gru", options, 3),
        ("boosting", {"algorithm": "boosting"}, 0),
        ("both", {"algorithm": "manydg-context", "context": "offline", "context_options": {"parts": ["relative"]}}, 3),
        ("best", {"algorithm": "best", "context": "none"}, 0),
    ]
    for name, given, erased in kinds:
        run = run_on(data, tmp_path / name, **given)
        audit = audit_run(run, data, load_split(tmp_path / name / "split.json", data))
        assert len(audit.erased) == erased
        assert any("features of one network" in sentence for sentence in audit.words) == (erased == 0)
        json.dumps(audit.to_json(), allow_nan=False)


def test_the_experiment_leaves_tables_that_the_report_shows(tmp_path: Path) -> None:
    data = people(2.0)
    config = TrainingConfig(
        epochs=1, backbone="mlp", backbone_options={"hidden": 8, "width": 8}, ratios=(0.5, 0.25, 0.25)
    )
    request = Request(data, Options(config), 1, ("base", "manydg"))
    experiment, results = IdentityAudit(), tmp_path / "results"
    records = Study(results, data.save(tmp_path / "data"), experiment.plan(request), "people", "cpu").execute()
    figures = experiment.aggregate(request, records, results)
    identity, score = (figures[name] for name in ("audit-identity", "audit-score"))
    assert all(parse_figure(figure.to_json()) == figure for figure in (identity, score))
    assert [row[:3] for row in identity.data.rows if row[0] == "manydg"][3:] == [  # type: ignore[union-attr]
        ["manydg", "unseen patients", space] for space in ("features v", "domain factor z", "logits")
    ]
    assert [row[1] for row in score.data.rows] == [1, 4, 1, 4]  # type: ignore[union-attr]
    assert experiment.name in Representation.experiments


def test_the_command_prints_words_or_json_and_refuses_another_dataset(
    commands: Any, recognisable: tuple[Run, DomainDataset, Audit], tmp_path: Path
) -> None:
    folder, audit = recognisable[0].folder, recognisable[2]
    assert folder is not None
    code, out, err = commands.run("audit", folder, folder.parent / "data")
    assert code == 0, err
    assert audit.words[-1] in " ".join(out.split())
    code, out, _ = commands.run("audit", folder, folder.parent / "data", "--json")
    assert json.loads(out)["identified"][0]["side"] == "train"
    people(0.5).save(tmp_path / "other")
    code, _, err = commands.run("audit", folder, tmp_path / "other")
    assert code == 2
    assert "another dataset" in err
