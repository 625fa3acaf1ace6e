"""After how many samples a patient is known, against plain loops, and that only training patients decide it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from manydg.data.context import add_context, estimate_strength
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.splits import split_patients
from manydg.data.timeline import MOST, samples_until_known, some_patients
from manydg.training.run import train


def make(patients: int = 30, samples: int = 256, stay: int = 1, apart: float = 1.0, seed: int = 0) -> DomainDataset:
    """Patients whose means lie ``apart``; noise of unit variance that stays the same for ``stay`` samples."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(patients), samples)
    noise = np.repeat(rng.normal(size=(patients * samples // stay, 4)), stay, axis=0)
    values = noise + apart * rng.normal(size=(patients, 4))[who]
    times = np.tile(np.arange(samples), patients)
    mixed = rng.permutation(len(who))
    return from_arrays(values[mixed], np.arange(len(who)) % 2, who[mixed], times=times[mixed], kind="binary")


def by_loop(data: DomainDataset, size: int) -> np.ndarray:
    """Error of pieces of a size over the variance of patients' means, one patient at a time, for each column."""
    values = data.column("x").numpy().astype(float)  # type: ignore[union-attr]
    who, times = data.domains.numpy(), data.times.numpy()  # type: ignore[union-attr]
    means, errors = [], []
    for patient in np.unique(who):
        mine = values[who == patient][np.argsort(times[who == patient])]
        means.append(np.nanmean(mine, axis=0))
        if len(mine) < 2 * size:
            continue
        for start in range(0, len(mine) - size + 1, size):
            errors.append((mine[start : start + size].mean(axis=0) - means[-1]) ** 2)
    return np.nanmean(errors, axis=0) / np.nanvar(means, axis=0)


@pytest.mark.parametrize("stay", [1, 8])
def test_it_is_the_size_of_piece_whose_mean_errs_as_much_as_the_populations(stay: int) -> None:
    data = make(stay=stay, apart=0.4)
    gaps = np.random.default_rng(1).random((len(data), 4)) < 0.02
    data = dataclasses.replace(data, columns={"x": data.column("x").masked_fill(torch.from_numpy(gaps), torch.nan)})  # type: ignore[union-attr]
    found = estimate_strength(data)
    assert found is not None
    lower = 2 ** int(np.log2(found))
    below, above = (float(np.sort(by_loop(data, size))[1]) for size in (lower, 2 * lower))
    assert below > 1 >= above
    share = np.log(below) / (np.log(below) - np.log(above))
    assert found == pytest.approx(lower * 2**share, rel=1e-9)


def test_independent_samples_need_the_ratio_of_variances_and_lasting_states_need_more() -> None:
    # Noise of variance 1 beside patients of variance 1/16: about 16 independent samples, and eight times as many
    # where every eight are the same.
    independent, lasting = (estimate_strength(make(200, 1024, stay, apart=0.25)) for stay in (1, 8))
    assert independent == pytest.approx(16, rel=0.3)
    assert lasting == pytest.approx(128, rel=0.3)


def test_one_sample_is_enough_where_patients_differ_more_than_their_samples() -> None:
    assert estimate_strength(make(apart=5.0)) == 1.0


def test_patients_who_are_alike_are_hardly_ever_known() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(20, 64, 1))
    alike = (noise - noise.mean(axis=1, keepdims=True)).reshape(-1, 1)
    assert samples_until_known(torch.from_numpy(alike), torch.arange(20).repeat_interleave(64)) == MOST


def test_too_few_patients_with_two_samples_say_nothing() -> None:
    assert samples_until_known(torch.randn(5, 2), torch.tensor([0, 0, 1, 1, 2])) is None
    single = from_arrays(np.arange(8.0)[:, None], [0, 1] * 4, np.arange(8), times=np.arange(8))
    assert estimate_strength(single) is None
    # Left open without an answer, it is 5.
    assert add_context(single).info.settings["context"]["strength"] == 5.0


def test_a_large_dataset_is_read_by_whole_patients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manydg.data.timeline._ROWS", 2000)
    data = make()
    rows = some_patients(data.domains.numpy())
    assert len(rows) == 8 * 256
    assert set(torch.bincount(data.domains[rows]).tolist()) == {0, 256}


def test_only_training_patients_decide_and_the_model_keeps_the_number(tmp_path: object) -> None:
    data = make(20, 16, apart=0.5)
    split = split_patients(data, (0.6, 0.2, 0.2), seed=3)
    values = data.column("x").clone()  # type: ignore[union-attr]
    values[torch.from_numpy(np.concatenate([split.val, split.test]))] *= 1e6
    other = dataclasses.replace(data, columns={"x": values})
    options = {"algorithm": "base", "context": "offline", "epochs": 1, "split": split, "device": "cpu"}
    strengths = [train(each, **options).record.context["strength"] for each in (data, other)]  # type: ignore[arg-type]
    assert strengths[0] == strengths[1] == estimate_strength(data.select(split.train))
    run = train(data, context_options={"strength": 3.0}, **options)  # type: ignore[arg-type]
    assert run.record.context["strength"] == 3.0
    assert run.prepare(data.select(split.test)).info.settings["context"]["strength"] == 3.0
