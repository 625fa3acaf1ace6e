"""A Markov chain of the classes in time, and best with one as its last part."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import manydg
from manydg.algorithms.best import Best
from manydg.backbones import _sequences as chains
from manydg.backbones._sequences import Chain, ClassChain, fit_chain
from manydg.data.context import add_order
from manydg.data.dataset import DomainDataset
from manydg.data.info import TargetSpec
from manydg.data.timeline import ORDER, PAUSE, SequenceOptions
from manydg.errors import ManyDGWarning
from manydg.targets import target_of
from manydg.training.inference import predict_probabilities

TARGET = target_of(TargetSpec("classes", ("a", "b")))
STICKY = Chain(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0.6, 0.4]), emission=1.0, prior=0.0, sharpness=1.0)


def by_enumeration(logits: np.ndarray, *, causal: bool) -> np.ndarray:
    """Marginals over all paths of the classes, each weighed by its chance and its evidence."""
    found = np.zeros_like(logits)
    for at in range(len(logits)):
        length = at + 1 if causal else len(logits)
        for path in itertools.product(range(2), repeat=length):
            chance = STICKY.shares[path[0]] * np.exp(sum(logits[step, state] for step, state in enumerate(path)))
            for one, other in itertools.pairwise(path):
                chance *= STICKY.transitions[one, other]
            found[at, path[at]] += chance
    return found / found.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("causal", [False, True])
def test_a_chain_gives_the_marginals_over_all_paths(causal: bool) -> None:
    logits = np.random.default_rng(0).normal(0, 1, (5, 2))
    pauses = np.array([np.nan, 1, 1, 1, 1])
    (read,) = STICKY.read([logits], [pauses], causal=causal)
    np.testing.assert_allclose(np.exp(read), by_enumeration(logits, causal=causal), atol=1e-9)


def test_sessions_and_long_pauses_are_read_apart() -> None:
    logits, order = (
        torch.randn(9, 2, generator=torch.Generator().manual_seed(0)),
        torch.tensor([8, 0, 1, 2, 5, 6, 7, 9, 3]),
    )
    pause = torch.ones(9, 1).log1p()
    pause[5] = np.log1p(50.0)
    module = ClassChain(STICKY, causal=False)
    whole = module(logits, order, pause)
    for rows in ([1, 2, 3, 8], [4], [5, 6, 0, 7]):
        alone = module(logits[rows], order[rows], pause[rows])
        torch.testing.assert_close(whole[rows], alone)


def test_a_sample_without_an_output_stays_without_one_and_spoils_no_other() -> None:
    logits, order, pause = torch.zeros(3, 2), torch.arange(3), torch.ones(3, 1).log1p()
    logits[1] = torch.nan
    read = ClassChain(STICKY, causal=False)(logits, order, pause)
    assert torch.isnan(read[1]).all()
    assert torch.isfinite(read[[0, 2]]).all()


def recordings(count: int = 24, samples: int = 20, *, sticky: bool = True) -> DomainDataset:
    """Two recordings of each patient, each of one class throughout, or of classes that change at random."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(count), 2 * samples)
    label = np.tile(np.repeat([0, 1], samples), count) if sticky else rng.integers(0, 2, len(who))
    times = np.tile(np.r_[np.arange(samples), 1000 + np.arange(samples)].astype(float), count)
    x = label[:, None] + rng.normal(0, 1.5, (len(who), 3))
    data = manydg.from_arrays(x.astype(np.float32), label, who, times=times)
    return add_order(data, SequenceOptions("chain", gap=100.0))


def logits_of(data: DomainDataset) -> torch.Tensor:
    x = data.column("x")
    assert isinstance(x, torch.Tensor)
    return torch.stack([torch.zeros(len(x)), x.mean(dim=1) - 0.5], dim=1)


def test_a_chain_is_chosen_where_classes_last_and_not_where_they_change_at_random() -> None:
    for sticky in (True, False):
        data = recordings(sticky=sticky)
        half = torch.arange(len(data)) < len(data) // 2
        train, val = (data.select(torch.nonzero(side).squeeze(1)) for side in (half, ~half))
        chained = fit_chain(TARGET, train, val, logits_of(val), 0, causal=False)
        assert (chained is not None) == sticky
        if chained is None:
            continue
        truth = TARGET.truth(val.targets)
        right = (chained.out_of_fold.argmax(dim=1) == truth).double().mean()
        assert right > (logits_of(val).argmax(dim=1) == truth).double().mean() + 0.1
        assert chained.chain.transitions.diagonal().min() > 0.9


def test_outputs_out_of_fold_do_not_depend_on_the_patients_own_labels() -> None:
    data = recordings()
    patients = data.domains
    train, val = (data.select(torch.nonzero(side).squeeze(1)) for side in (patients < 12, patients >= 12))
    first = fit_chain(TARGET, train, val, logits_of(val), 0, causal=False)
    assert first is not None
    own = val.domains == val.domains[0]
    targets = val.targets.clone()
    targets[own] = 1 - targets[own]
    turned = fit_chain(TARGET, train, dataclasses.replace(val, targets=targets), logits_of(val), 0, causal=False)
    assert turned is not None
    torch.testing.assert_close(first.out_of_fold[own], turned.out_of_fold[own])


def test_best_reads_classes_in_time_and_is_the_same_after_it_is_opened_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    label, who = np.tile(np.repeat([0, 1], [12, 6]), 30), np.repeat(np.arange(30), 18)
    times = np.tile(np.r_[np.arange(12), 1000 + np.arange(6)].astype(float), 30)
    x = (label[:, None] + rng.normal(0, 2, (len(label), 3))).astype(np.float32)
    data = manydg.from_arrays(x, label, who, times=times)
    config = manydg.TrainingConfig(
        "best", epochs=8, batch_size=32, ratios=(0.5, 0.25, 0.25), execution="plain", context="offline",
        sequence_options={"gap": 100.0},
    )  # fmt: skip
    with pytest.warns(ManyDGWarning, match="best leaves sequence models out"):
        run = manydg.train(data, config, out=tmp_path / "run")
    assert isinstance(run.algorithm, Best)
    assert run.algorithm.chain is not None
    assert "Markov chain" in run.record.members_rule
    assert not any("sequence" in member.name for member in run.record.members)
    prepared = run.prepare(data)
    opened = manydg.open_run(tmp_path / "run")
    torch.testing.assert_close(
        predict_probabilities(opened.algorithm, prepared), predict_probabilities(run.algorithm, prepared)
    )
    assert {ORDER, PAUSE} <= set(prepared.columns)


def test_a_causal_chain_never_reads_a_later_sample() -> None:
    logits, order, pause = torch.randn(6, 2), torch.arange(6), torch.ones(6, 1).log1p()
    changed = logits.clone()
    changed[4, 0] += 3.0
    for causal, first in ((True, 4), (False, 0)):
        module = ClassChain(STICKY, causal=causal)
        moved = (module(logits, order, pause) - module(changed, order, pause)).abs().amax(dim=1) > 1e-6
        assert moved.tolist() == [row >= first for row in range(6)]


@pytest.mark.parametrize(("with_chain", "chosen"), [([0.1, 1.2, 1.2], 0), ([0.7, 0.8, 0.9], 1), ([1.1, 1.2, 1.3], 0)])
def test_a_chain_must_gain_more_than_its_standard_error_over_patients(with_chain: list[float], chosen: int) -> None:
    assert chains._best(torch.tensor([[1.0, 1.0, 1.0], with_chain])) == chosen
