"""best: several learners weighed on validation patients, as one ordinary run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import manydg
from manydg import jobs
from manydg.algorithms import best
from manydg.algorithms.best import Best, Candidate, Stack, candidates, second_is_worse, stack
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.data.info import TargetSpec
from manydg.errors import ConfigError
from manydg.evaluation.metrics import read_predictions
from manydg.studies.summary import Selection, composition
from manydg.targets import target_of
from manydg.training import fit as fitting
from manydg.training.inference import predict_logits, settled, with_context
from manydg.training.record import MemberEntry, RunRecord

TARGET = target_of(TargetSpec("classes", ("a", "b", "c")))
CONFIG = manydg.TrainingConfig(
    "best",
    epochs=2,
    batch_size=64,
    ratios=(0.5, 0.25, 0.25),
    execution="plain",
    context_options={"parts": ["relative"]},
)


def patients(count: int = 16, samples: int = 12, *, timed: bool = True) -> DomainDataset:
    """A patient's shift hides the class from whoever does not know the patient."""
    rng = np.random.default_rng(0)
    who, label = np.repeat(np.arange(count), samples), np.tile(np.arange(samples) % 3, count)
    x = 2 * np.eye(3)[label] + rng.normal(0, 2, (count, 3))[who] + rng.normal(0, 0.5, (len(who), 3))
    times = np.tile(np.arange(float(samples)), count) if timed else None
    return manydg.from_arrays(x.astype(np.float32), label, who, times=times)


def outputs(skill: float, truth: torch.Tensor, seed: int) -> torch.Tensor:
    noise = torch.randn(len(truth), 3, generator=torch.Generator().manual_seed(seed))
    return skill * torch.nn.functional.one_hot(truth, 3) + noise


def weigh(each: dict[str, torch.Tensor], truth: torch.Tensor, who: torch.Tensor, seed: int = 0) -> Stack:
    return stack(TARGET, each, truth, who, seed)


def test_a_candidate_that_knows_is_used_and_noise_is_not() -> None:
    truth, who = torch.arange(600) % 3, torch.arange(600) // 60
    weighed = weigh({"a": outputs(0.0, truth, 1), "b": outputs(1.5, truth, 2)}, truth, who)
    assert weighed.shares[1] > 0.95
    assert sum(weighed.shares) == pytest.approx(1.0)


def test_two_that_know_different_things_beat_each() -> None:
    truth, who = torch.arange(600) % 3, torch.arange(600) // 60
    each = {"a+context": outputs(2.0, truth, 1), "b": outputs(2.0, truth, 2)}
    weighed = weigh(each, truth, who)
    assert weighed.reason.startswith("a fitted mixture, by the loss out of fold of 10 validation patients")
    assert all(0.3 < share < 0.7 for share in weighed.shares)
    assert float(TARGET.loss(weighed.out_of_fold, truth)) < min(float(TARGET.loss(one, truth)) for one in each.values())


def noisy(n_patients: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Two candidates whose errors are nearly the same; the one without context is a little worse for most patients."""
    truth, who = torch.arange(30 * n_patients) % 3, torch.arange(30 * n_patients) // 30
    first, noise = outputs(1.5, truth, seed), torch.randn(n_patients, 3, generator=torch.Generator().manual_seed(seed))
    return {"a+context": first, "b": 0.9 * first + 0.3 * noise[who]}, truth, who


@pytest.mark.parametrize("seed", range(4))
def test_of_four_patients_differences_within_chance_leave_the_candidate_with_context(seed: int) -> None:
    weighed = weigh(*noisy(4, seed))
    assert weighed.weights.tolist() == [1.0, 0.0]
    assert weighed.reason.startswith("a+context, by the loss out of fold of 4 validation patients: a fitted mixture")
    assert " ± " in weighed.reason


def test_in_doubt_several_with_context_have_equal_weights() -> None:
    each, truth, who = noisy(4, 0)
    both = {"a+context": each["a+context"], "c+context": each["a+context"] + 1e-3 * each["b"], "b": each["b"]}
    assert weigh(both, truth, who).shares == pytest.approx([0.5, 0.5, 0.0])


def test_many_patients_choose_fitted_weights_in_doubt() -> None:
    truth, who = torch.arange(3000) % 3, torch.arange(3000) // 30
    first = outputs(1.5, truth, 1)
    weighed = weigh({"a+context": first, "b": first + 0.3 * outputs(0.3, truth, 2)}, truth, who)
    assert weighed.reason.startswith("a fitted mixture, by the loss out of fold of 100 validation patients")


def test_a_patient_s_own_labels_never_weigh_the_patient() -> None:
    truth, who = torch.arange(300) % 3, torch.arange(300) // 30
    each = {"a": outputs(2.0, truth, 1), "b": outputs(2.0, truth, 2)}
    own = who == 4
    changed = torch.where(own, (truth + 1) % 3, truth)
    before, after = (weigh(each, labels, who, seed=3).out_of_fold for labels in (truth, changed))
    torch.testing.assert_close(before[own], after[own])
    assert not torch.allclose(before[~own], after[~own])


def test_outputs_out_of_fold_are_of_what_other_patients_choose() -> None:
    truth, who = torch.arange(1500) % 3, torch.arange(1500) // 300
    right, base = torch.nn.functional.one_hot(truth, 3), outputs(1.0, truth, 1)
    # By how much "b" is ahead of "a" for each patient: clearly with the first patient, in doubt without.
    each = {"a+context": base, "b": base + torch.tensor([1.0, 1.0, 0.1, -0.1, -0.1])[who, None] * right}
    assert weigh(each, truth, who).reason.startswith("b, by")
    chosen = weigh(each, truth, who).out_of_fold[who == 0]
    torch.testing.assert_close(chosen, base[who == 0].double().log_softmax(-1))


def test_one_validation_patient_leaves_the_candidate_with_context() -> None:
    truth = torch.arange(30) % 3
    each = {"a+context": outputs(0.0, truth, 1), "b": outputs(4.0, truth, 2)}
    weighed = weigh(each, truth, torch.zeros(30))
    assert weighed.weights.tolist() == [1.0, 0.0]
    assert weighed.reason == "a+context: nothing to compare"
    without = {"a": each["a+context"], "b": each["b"]}
    assert weigh(without, truth, torch.zeros(30)).shares == [0.5, 0.5]


def test_the_candidates_are_those_that_the_data_allow() -> None:
    schema = InputSchema.of(with_context(patients(), CONFIG, torch.device("cpu")))
    labels = [candidate.label for candidate in candidates(schema)]
    assert labels[:4] == ["ema+context+sequence", "ema+context", "ema", "ema+sequence"]
    assert len(labels) == 8
    assert all(Candidate.of(label).label == label for label in labels)
    without_times = InputSchema.of(with_context(patients(timed=False), CONFIG, torch.device("cpu")))
    assert not [one.label for one in candidates(without_times) if "sequence" in one.options]
    signals = InputSchema.of(
        manydg.from_arrays({"signal": np.zeros((4, 2, 4000), np.float32)}, [0, 1, 0, 1], list("aabb"))
    )
    assert [one.label for one in candidates(signals)] == ["ema"]


def test_context_is_causal_for_measurements_with_times_unless_it_is_given() -> None:
    assert settled(CONFIG, patients()).context == "causal"
    assert settled(CONFIG.replace(context="offline"), patients()).context == "offline"
    assert settled(CONFIG, patients(timed=False)).context == "offline"
    assert settled(CONFIG.replace(algorithm="base"), patients()) == CONFIG.replace(algorithm="base")


def test_without_context_no_other_sample_is_looked_at_in_order_either() -> None:
    assert settled(CONFIG, patients()).sequence == "gru"
    assert settled(CONFIG.replace(context="none"), patients()).sequence == "none"
    assert settled(CONFIG.replace(context="none", sequence="conv"), patients()).sequence == "conv"


def test_a_run_of_best_is_one_folder_that_opens_and_predicts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best, "_FEW", 0)  # So that the weights are fitted.
    data = patients()
    run = manydg.train(data, CONFIG, out=tmp_path / "run", device="cpu")
    opened = manydg.open_run(tmp_path / "run")
    assert isinstance(opened.algorithm, Best)
    np.testing.assert_allclose(opened.predict_proba(data), run.predict_proba(data), atol=1e-6)
    assert opened.record.members == run.record.members
    assert opened.record.members_rule.startswith("a fitted mixture, by the loss out of fold of 4 validation patients")
    assert sum(member.share for member in run.record.members) == pytest.approx(1.0)
    assert all(member.val["kappa"] is not None for member in run.record.members)
    assert not (tmp_path / "run" / "members").exists()
    kept = read_predictions(tmp_path / "run" / "predictions.npz", "val", run.algorithm.target)
    assert kept.rows is not None
    # Out of fold: what the threshold, the temperature and the prediction sets are fitted on.
    assert not np.allclose(kept.probabilities, run.predict_proba(data)[kept.rows], atol=1e-6)
    weights = {label: float(member.weight) for label, member in run.algorithm.others.items()}  # type: ignore[union-attr, arg-type, operator]
    assert weights == {label: float(member.weight) for label, member in opened.algorithm.others.items()}  # type: ignore[arg-type, union-attr]


def test_later_samples_and_other_patients_never_reach_a_causal_best(tmp_path: Path) -> None:
    data = patients()
    run = manydg.train(data, CONFIG, device="cpu")
    x = data.columns["x"]
    assert isinstance(x, torch.Tensor)
    assert data.times is not None
    moved = x.clone()
    scored = (data.domains == 3) & (data.times <= 5)
    moved[~scored] += 100.0 * torch.rand(int((~scored).sum()), 3)
    changed = dataclasses.replace(data, columns={"x": moved}, stored_hash=None)
    rows = torch.nonzero(scored).squeeze(1).numpy()
    np.testing.assert_allclose(run.predict_proba(changed)[rows], run.predict_proba(data)[rows], atol=1e-5)


def test_a_stopped_run_of_best_goes_on_with_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = patients()
    whole = manydg.train(data, CONFIG, out=tmp_path / "whole", device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr(fitting, "stack", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            manydg.train(data, CONFIG, out=tmp_path / "run", device="cpu")
    with pytest.raises(manydg.ManyDGError, match="another folder"):
        manydg.train(data, CONFIG.replace(lr=0.1), out=tmp_path / "run", device="cpu")
    epochs: list[str] = []
    original = fitting.TrainingLoop._run_epoch
    monkeypatch.setattr(
        fitting.TrainingLoop, "_run_epoch", lambda self, *a: (epochs.append("x"), original(self, *a))[1]
    )
    again = manydg.train(data, CONFIG, out=tmp_path / "run", device="cpu")
    assert not epochs
    np.testing.assert_allclose(again.predict_proba(data), whole.predict_proba(data), atol=1e-6)


def test_best_does_not_learn_continually() -> None:
    data = patients()
    fitted = fitting.fit(CONFIG.replace(epochs=1), data, None, torch.device("cpu"))
    assert len(fitted.algorithm.others) == 2  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="by themselves"):
        fitting.fit_further(fitted, CONFIG, data, data, torch.device("cpu"))


def test_a_table_says_what_best_is_made_of_on_average() -> None:
    record = RunRecord(run="1", algorithm="best", seed=0, dataset="d", config=CONFIG)
    shares = ((0.9, 0.1), (0.5, 0.5))
    runs = {
        seed: record.replace(members=(MemberEntry("lightgbm", first, {}), MemberEntry("ema", second, {})))
        for seed, (first, second) in enumerate(shares)
    }
    notes = composition(Selection("compare", "d", TARGET, {"base": {0: record}, "best": runs}, (0, 1), ()))
    assert notes == ["best weighs its candidates, on average over the splits: lightgbm 70%, ema 30%"]
    alone = record.replace(members=(MemberEntry("lightgbm", 1.0, {}), MemberEntry("ema", 0.0, {})))
    (note,) = composition(Selection("compare", "d", TARGET, {"best": runs | {2: alone}}, (0, 1, 2), ()))
    assert (
        note
        == "best weighs its candidates, on average over the splits: lightgbm 80%, ema 20%; one of them alone on 1 of 3"
    )


def test_of_many_samples_each_tree_sees_a_share() -> None:
    few, many = (Candidate("lightgbm").configured(CONFIG, rows).settings for rows in (60_000, 240_000))
    assert few == {}
    assert many == {"sample_share": 0.25}
    assert "sample_share" not in Candidate("ema").configured(CONFIG, 240_000).settings


def test_without_context_nothing_else_is_trained_where_the_plain_network_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = with_context(patients(), CONFIG, torch.device("cpu"))
    val = data.select(np.flatnonzero(data.domains.numpy() < 4))
    config = CONFIG.replace(epochs=1)
    for behind in (True, False):
        monkeypatch.setattr(fitting, "second_is_worse", lambda *_, answer=behind: answer)
        fitted = fitting.fit(config, data, val, torch.device("cpu"))
        without = [member.name for member in fitted.members if "context" not in member.name]
        assert without == (["ema"] if behind else ["ema", "ema+sequence", "lightgbm+large-leaves", "lightgbm"])


def test_a_loss_larger_by_more_than_a_standard_error_is_behind() -> None:
    truth, who = torch.arange(240) % 3, torch.arange(240) // 30
    good, bad = outputs(2.0, truth, 1), outputs(0.5, truth, 2)
    assert second_is_worse(TARGET, {"a": good, "b": bad}, truth, who, 0)
    assert not second_is_worse(TARGET, {"a": bad, "b": good}, truth, who, 0)
    assert not second_is_worse(TARGET, {"a": good, "b": good}, truth, who, 0)
    assert not second_is_worse(TARGET, {"a": good, "b": bad}, truth, torch.zeros(240), 0)


def test_lightgbm_in_a_worker_has_a_share_of_the_cores_and_grows_the_same_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MANYDG_SHARE_OF_CORES", "")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    jobs._start_worker(5)
    assert jobs.threads_of_trees() == torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    data, config = patients(timed=False), CONFIG.replace(algorithm="lightgbm", settings={"rounds": 10})
    outputs_by = {}
    for workers, threads in ((10, 1), (5, 2)):
        jobs._start_worker(workers)
        assert jobs.threads_of_trees() == threads
        outputs_by[threads] = predict_logits(fitting.fit(config, data, None, torch.device("cpu")).algorithm, data)
    assert torch.equal(outputs_by[1], outputs_by[2])
