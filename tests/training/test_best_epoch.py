"""The epoch that is kept, on a model whose validation curve is written down: it rises and falls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm, Optimizers
from manydg.backbones import Backbone, Inputs
from manydg.config import TrainingConfig
from manydg.data.dataset import Batch, DomainDataset, from_arrays
from manydg.data.splits import split_named
from manydg.errors import DataError, TrainingError
from manydg.targets import Target
from manydg.training.fit import fit
from manydg.training.run import Run, open_run, train

CURVE = (0.5, 0.7, 0.9, 0.6, 0.3)
"""Share of right answers after each epoch: the third is the best, the last the worst."""
STEPS = 4


class Scripted(Algorithm):
    """Counts its steps in a weight, and answers as many samples right as the curve says for that epoch.

    A row is the answer, the row's rank from 0 to 1, and the patient's number; from 50 on the curve is turned round.
    """

    curve = CURVE
    seen: list[float]

    def __init__(self, backbone: Backbone, target: Target, n_domains: int, settings: object = None) -> None:
        super().__init__(backbone, target, n_domains)
        self.count = nn.Parameter(torch.zeros(()))
        self.seen = []

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return {"supervised": 0 * self.count}

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, Tensor]:
        with torch.no_grad():
            self.count += 1
        self.seen.append(float(self.progress))
        return {"supervised": self.count.detach() * 0}

    def predict(self, inputs: Inputs) -> Tensor:
        x = inputs["x"]
        assert isinstance(x, Tensor)
        share = self.curve[round(float(self.count)) // STEPS - 1]
        wanted = torch.where(x[:, 2] >= 50, 1 - share, share)
        answer = torch.where(x[:, 1] < wanted, x[:, 0], 1 - x[:, 0])
        return 4.0 * torch.stack([1 - answer, answer], dim=1) - 2.0


class Plateau(Scripted):
    curve = (0.5, 0.9, 0.7, 0.9, 0.9)


class Interrupted(Scripted):
    """Fails once, in the epoch after the one that follows the best."""

    flag = ""

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, Tensor]:
        if round(self.count.item()) == 4 * STEPS and not Path(self.flag).exists():
            Path(self.flag).touch()
            raise TrainingError("the power went off")
        return super().step(batch, optimizers)


def _samples(patients: int, first: int = 0, samples: int = 40) -> DomainDataset:
    """Patients with as many samples each, half of either answer; the ranks of both answers are the same."""
    who, answer = np.repeat(np.arange(patients) + first, samples), np.tile(np.arange(samples) % 2, patients)
    rank = np.tile((np.arange(samples) // 2 + 0.5) / (samples // 2), patients)
    return from_arrays(np.stack([answer, rank, who], axis=1), answer, who, kind="classes")


def _name(cls: type[Algorithm]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _train(cls: type[Algorithm], out: Path | None = None) -> Run:
    # Eight training patients of forty samples: four steps of eighty.
    return train(_samples(10), algorithm=_name(cls), epochs=5, batch_size=80, out=out, device="cpu")


def test_the_third_of_five_epochs_is_kept_where_the_curve_rises_and_falls(tmp_path: Path) -> None:
    run = _train(Scripted, tmp_path)
    assert [entry.val["accuracy"] for entry in run.record.history] == pytest.approx(CURVE)
    assert run.record.epoch == 3
    assert run.record.val["accuracy"] == pytest.approx(0.9)
    assert run.record.test["accuracy"] == pytest.approx(0.9)
    for algorithm in (run.algorithm, open_run(tmp_path).algorithm):
        assert float(algorithm.state_dict()["count"]) == 3 * STEPS


def test_of_epochs_that_are_equally_good_the_first_is_kept() -> None:
    run = _train(Plateau)
    assert run.record.epoch == 2
    assert float(run.algorithm.state_dict()["count"]) == 2 * STEPS


def test_the_epoch_is_chosen_on_validation_patients_where_training_patients_say_otherwise() -> None:
    """The curve of the validation patients is turned round: their best epoch is the training patients' worst."""
    config = TrainingConfig(algorithm=_name(Scripted), epochs=5, batch_size=80)
    fitted = fit(config, _samples(8), _samples(1, first=50), torch.device("cpu"))
    assert [entry.val["accuracy"] for entry in fitted.history] == pytest.approx([1 - share for share in CURVE])
    assert fitted.epoch == 5


def test_without_validation_patients_the_last_epoch_is_kept() -> None:
    config = TrainingConfig(algorithm=_name(Scripted), epochs=5, batch_size=80)
    fitted = fit(config, _samples(8), None, torch.device("cpu"))
    assert fitted.epoch == 5
    assert float(fitted.algorithm.state_dict()["count"]) == 5 * STEPS


def test_a_run_continued_after_its_best_epoch_still_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interrupted, "flag", str(tmp_path / "flag"))
    with pytest.raises(TrainingError, match="power"):
        _train(Interrupted, tmp_path / "run")
    run = _train(Interrupted, tmp_path / "run")
    assert run.record.epoch == 3
    assert float(run.algorithm.state_dict()["count"]) == 3 * STEPS


def test_progress_grows_step_by_step_from_0_to_almost_1() -> None:
    config = TrainingConfig(algorithm=_name(Scripted), epochs=5, batch_size=80)
    fitted = fit(config, _samples(8), None, torch.device("cpu"))
    assert isinstance(fitted.algorithm, Scripted)
    assert fitted.algorithm.seen == pytest.approx(np.arange(5 * STEPS) / (5 * STEPS))


class Traded(Scripted):
    """Two metrics that prefer different epochs: ever more samples of the common class right, ever fewer of the rare."""

    def predict(self, inputs: Inputs) -> Tensor:
        x = inputs["x"]
        assert isinstance(x, Tensor)
        share = round(float(self.count)) / STEPS / 5
        right = torch.where(x[:, 0] > 0, x[:, 1] < 1.1 - share, x[:, 1] < share)
        answer = torch.where(right, x[:, 0], 1 - x[:, 0])
        return 4.0 * torch.stack([1 - answer, answer], dim=1) - 2.0


def test_the_metric_that_chooses_the_epoch_can_be_another() -> None:
    """Nine in ten are of the common class: accuracy rises with it, kappa suffers from what the rare class loses."""
    labels = np.tile(np.r_[np.zeros(36, int), np.ones(4, int)], 10)
    rank = np.tile(np.r_[(np.arange(36) + 0.5) / 36, (np.arange(4) + 0.5) / 4], 10)
    who = np.repeat(np.arange(10), 40)
    data = from_arrays(np.stack([labels, rank, who], axis=1), labels, who, kind="classes")
    runs = {
        metric: train(data, algorithm=_name(Traded), epochs=5, batch_size=80, selection=metric, device="cpu")
        for metric in ("accuracy", "kappa")
    }
    for metric, run in runs.items():
        values = [entry.val[metric] for entry in run.record.history]
        assert run.record.epoch == 1 + int(np.argmax(values))  # type: ignore[arg-type]
        assert run.record.selection_rule == f"epoch with the highest validation {metric}"
    assert runs["accuracy"].record.epoch != runs["kappa"].record.epoch


@pytest.mark.parametrize("algorithm", ["base", "boosting"])
def test_validation_patients_of_one_class_choose_nothing_by_kappa(algorithm: str) -> None:
    """It is 0 or undefined for every epoch, whatever the model predicts: the first would be kept."""
    who = np.repeat(np.arange(12), 10)
    x, y = np.random.default_rng(0).normal(size=(len(who), 3)).astype(np.float32), who % 2
    data = from_arrays(x, y, who, kind="classes")
    split = split_named(data, train=range(6), val=(6, 8), test=(7, 9, 10, 11))
    with pytest.raises(DataError, match=r"the validation kappa is undefined: too few classes .* 2 validation patient"):
        train(data, algorithm=algorithm, epochs=2, split=split, device="cpu")
    assert train(data, algorithm=algorithm, epochs=2, split=split, selection="accuracy", device="cpu").record.ok
