"""What a training run does and leaves behind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, cohen_kappa_score
from torch import Tensor, nn

from manydg.algorithms import ALGORITHMS
from manydg.algorithms.base import Base
from manydg.config import TrainingConfig
from manydg.data.dataset import Batch, DomainDataset, InputSchema, from_arrays
from manydg.data.splits import load_split, patient_labels, split_patients
from manydg.errors import ConfigError, DataError, StorageError, TrainingError
from manydg.evaluation.metrics import choose_threshold
from manydg.training.record import RunRecord
from manydg.training.run import draw_split, open_run, train

FIELDS = {
    "schema", "run", "experiment", "variant", "algorithm", "seed", "dataset", "dataset_hash", "target", "samples",
    "patients", "config", "code_version", "selection_rule", "threshold", "threshold_rule", "epoch", "epochs", "val",
    "test", "per_patient", "history", "seconds", "peak_memory_mb", "parameters", "device", "status", "error", "folder",
}  # fmt: skip


def test_the_record_says_what_ran_on_what_and_how_it_did(small_dataset: DomainDataset, tmp_path: Path) -> None:
    run = train(small_dataset, epochs=3, seed=2, out=tmp_path, device="cpu", name="small", lr=0.01)
    record = json.loads((tmp_path / "run.json").read_text())
    assert set(record.pop("integrity")["files"]) == {
        "model.safetensors", "calibration.safetensors", "personal.safetensors", "predictions.npz", "split.json"
    }  # fmt: skip
    assert record == run.record.to_json()
    assert RunRecord.from_json(record) == run.record
    assert set(record) >= FIELDS
    assert record["dataset"] == "small"
    assert record["dataset_hash"] == small_dataset.content_hash()
    assert record["config"]["lr"] == 0.01
    assert record["config"]["batch_size"] == 256
    assert record["config"]["backbone"] == "mlp"
    assert record["config"]["settings"]["mmd"] == 1.0
    assert record["patients"] == {"train": 10, "val": 1, "test": 1}
    assert sum(record["samples"].values()) == len(small_dataset)
    assert [entry["epoch"] for entry in record["history"]] == [1, 2, 3]
    assert set(record["history"][0]) >= {"epoch", "losses", "val", "seconds"}
    assert set(record["history"][0]["losses"]) == {"supervised", "mmd", "reconstruction", "similarity"}
    assert record["parameters"] == sum(parameter.numel() for parameter in run.algorithm.parameters())
    assert (record["status"], record["error"], record["device"]) == ("ok", None, "cpu")
    assert record["seconds"] > 0
    assert record["peak_memory_mb"] > 0


def test_the_epoch_is_the_best_on_validation_patients(small_dataset: DomainDataset) -> None:
    run = train(small_dataset, epochs=6, seed=3, lr=0.02)
    kappas = [entry.val["kappa"] for entry in run.record.history]
    assert run.record.selection_rule == "epoch with the highest validation kappa"
    assert run.record.epoch == 1 + int(np.argmax(kappas))
    assert run.record.val["kappa"] == max(kappas)


def test_the_metrics_are_those_of_the_predictions_it_leaves(small_dataset: DomainDataset, tmp_path: Path) -> None:
    train(small_dataset, epochs=2, out=tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    with np.load(tmp_path / "predictions.npz") as arrays:
        found = dict(arrays)
    assert set(found) == {"split", "row", "patient", "pseudonyms", "probabilities", "truth"}
    assert found["probabilities"].dtype == np.float32
    test = found["split"] == 1
    chosen = found["probabilities"][test].argmax(axis=1)
    assert record["test"]["accuracy"] == pytest.approx(accuracy_score(found["truth"][test], chosen))
    assert record["test"]["kappa"] == pytest.approx(cohen_kappa_score(found["truth"][test], chosen))
    assert np.array_equal(small_dataset.targets.numpy()[found["row"]], found["truth"])
    aliases = np.array(small_dataset.pseudonyms())[small_dataset.domains.numpy()[found["row"]]]
    assert np.array_equal(found["pseudonyms"][found["patient"]], aliases)
    assert set(record["per_patient"]) == set(aliases[test])
    assert sum(entry["samples"] for entry in record["per_patient"].values()) == test.sum()
    assert all(isinstance(entry["samples"], int) for entry in record["per_patient"].values())


class CountsPredictions(Base):
    """Base, which notes the first value of every row it predicts in evaluation."""

    seen: list[float] = []  # noqa: RUF012 - one list for the class is the point

    def predict(self, inputs: Any) -> Tensor:
        if not self.training:
            CountsPredictions.seen += inputs["x"][:, 0].tolist()
        return super().predict(inputs)


def test_patients_that_a_dataset_reserves_for_the_test_are_tested_and_no_others(small_dataset: DomainDataset) -> None:
    names = small_dataset.patients.tolist()
    info = dataclasses.replace(small_dataset.info, test_patients=tuple(names[:4]))
    dataset = dataclasses.replace(small_dataset, info=info)
    for seed in range(3):
        split = draw_split(dataset, TrainingConfig(seed=seed))
        assert split.patients("test").tolist() == sorted(names[:4])
        others = {*split.patients("train").tolist(), *split.patients("val").tolist()}
        assert others == set(names[4:])


def test_the_seeds_of_a_repeat_test_every_patient_once_and_repeats_differ(small_dataset: DomainDataset) -> None:
    splits = [draw_split(small_dataset, TrainingConfig(seed=seed, folds=4)) for seed in range(8)]
    for repeat in (splits[:4], splits[4:]):
        tested = [name for split in repeat for name in split.patients("test").tolist()]
        assert sorted(tested) == sorted(small_dataset.patients.tolist())
    assert splits[0] != splits[4]
    reserved = dataclasses.replace(small_dataset.info, test_patients=(str(small_dataset.patients[0]),))
    with pytest.raises(ConfigError, match="names its test patients"):
        draw_split(dataclasses.replace(small_dataset, info=reserved), TrainingConfig(folds=4))


def test_a_stratified_run_splits_by_the_patients_labels(dataset_of: Callable[..., DomainDataset]) -> None:
    data = dataset_of("binary", patients=20, samples=2)
    wanted = split_patients(data, (0.5, 0.25, 0.25), 3, patient_labels(data))
    config = TrainingConfig(seed=3, ratios=(0.5, 0.25, 0.25), stratify=True)
    assert draw_split(data, config) == wanted
    assert draw_split(data, config.replace(stratify=False)) == split_patients(data, (0.5, 0.25, 0.25), 3)


def test_the_threshold_is_the_validation_patients_best_and_not_the_test_patients(
    dataset_of: Callable[..., DomainDataset],
) -> None:
    """On three seeds; on one of them at least the test patients would choose another."""
    data, others = dataset_of("binary", patients=20, samples=6), 0
    for seed in range(3):
        run = train(data, algorithm="base", epochs=1, seed=seed, ratios=(0.5, 0.25, 0.25), device="cpu")
        split = draw_split(data, run.config)
        chosen = {}
        for side in ("val", "test"):
            part = data.select(getattr(split, side))
            chosen[side] = choose_threshold(run.algorithm.target, part.targets.numpy(), run.predict_proba(part))[0]
        assert run.record.threshold == pytest.approx(chosen["val"])
        others += chosen["test"] != pytest.approx(chosen["val"])
    assert others


def test_the_test_patients_are_scored_once(small_dataset: DomainDataset, tmp_path: Path) -> None:
    CountsPredictions.seen.clear()
    algorithm = f"{CountsPredictions.__module__}:CountsPredictions"
    train(small_dataset, algorithm=algorithm, epochs=4, out=tmp_path)
    split = load_split(tmp_path / "split.json", small_dataset)
    values = small_dataset.column("x")[:, 0]
    times = {side: {CountsPredictions.seen.count(float(values[row])) for row in getattr(split, side)}
             for side in ("train", "val", "test")}  # fmt: skip
    assert times["test"] == {1}
    assert times["train"] == {0}
    # Once after each epoch, and once more with the weights that were chosen.
    assert times["val"] == {5}


@pytest.mark.parametrize("kind", ["classes", "votes", "binary", "multilabel"])
def test_no_patients_name_is_in_any_file_or_word_of_a_run(
    commands: Any, dataset_of: Callable[..., DomainDataset], tmp_path: Path, kind: str
) -> None:
    source = dataset_of(kind, patients=20)
    names = [f"Jane-Doe-{code}" for code in range(20)]
    data = from_arrays(
        source.column("x"), source.targets, [names[code] for code in source.domains.tolist()], kind=kind
    )  # fmt: skip
    data.save(tmp_path / "data")
    code, out, err = commands.run("train", tmp_path / "data", "--epochs", 2, "--out", tmp_path / "run")
    assert code == 0, err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert all(alias.startswith("P-") for alias in record["per_patient"])
    for file in (tmp_path / "run").rglob("*"):
        assert b"Jane" not in file.read_bytes(), file
    with np.load(tmp_path / "run" / "predictions.npz") as arrays:
        assert not any("Jane" in alias for alias in arrays["pseudonyms"])
    assert "Jane" not in out + err


def test_the_same_seed_gives_the_same_run_and_another_seed_another(small_dataset: DomainDataset) -> None:
    first, same, other = (train(small_dataset, epochs=2, seed=seed) for seed in (1, 1, 2))
    for name, tensor in first.algorithm.state_dict().items():
        assert torch.equal(tensor, same.algorithm.state_dict()[name])
    for key in ("val", "test", "per_patient", "epoch", "threshold"):
        assert getattr(first.record, key) == getattr(same.record, key)
    assert first.record.per_patient != other.record.per_patient


def test_an_opened_run_predicts_the_same_and_refuses_other_columns(
    small_dataset: DomainDataset, tmp_path: Path
) -> None:
    trained = train(small_dataset, epochs=2, out=tmp_path)
    opened = open_run(tmp_path)
    assert np.array_equal(opened.predict_proba(small_dataset), trained.predict_proba(small_dataset))
    x = small_dataset.column("x")
    rest = (small_dataset.targets, small_dataset.domains)
    with pytest.raises(DataError, match="not known to it: \\['age'\\]"):
        opened.predict_proba(from_arrays({"x": x, "age": x[:, :1]}, *rest, kind="classes"))
    with pytest.raises(DataError, match="missing here: \\['x'\\]"):
        opened.predict_proba(from_arrays({"y": x}, *rest, kind="classes"))
    with pytest.raises(DataError, match="but the model was trained on"):
        opened.predict_proba(from_arrays(x[:, :3], *rest, kind="classes"))


def test_an_unfinished_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not a finished run"):
        open_run(tmp_path)


def test_any_module_is_a_backbone(small_dataset: DomainDataset, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.Softplus())

    run = train(small_dataset, epochs=2, backbone=make(), out=tmp_path)
    assert run.algorithm.backbone.output_size == 8
    opened = open_run(tmp_path, backbone=make())
    assert np.array_equal(opened.predict_proba(small_dataset), run.predict_proba(small_dataset))
    with pytest.raises(StorageError, match="does not fit the model"):
        open_run(tmp_path, backbone=nn.Sequential(nn.Linear(6, 4), nn.Softplus()))


class TurnsNaN(Base):
    """Base, one of whose terms becomes NaN in the third epoch, at its second step."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(batch)
        late = float(self.progress) >= 2.4 / 4
        terms["penalty"] = terms["supervised"] * (0.1 if not late else float("nan"))
        return terms


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_epoch(
    small_dataset: DomainDataset, tmp_path: Path
) -> None:
    algorithm = f"{TurnsNaN.__module__}:TurnsNaN"
    with pytest.raises(TrainingError, match=r"loss term 'penalty' is nan at step 2 of epoch 3") as caught:
        train(small_dataset, algorithm=algorithm, epochs=4, batch_size=40, out=tmp_path)
    assert "a batch of 40 samples of" in str(caught.value)
    assert "epoch 2 is kept in" in str(caught.value)
    from manydg.training.record import read_tensors

    tensors, meta = read_tensors(tmp_path / "checkpoint.safetensors")
    assert len(meta["history"]) == 2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    assert not (tmp_path / "run.json").exists()


def test_a_learning_rate_that_explodes_is_named(small_dataset: DomainDataset) -> None:
    with pytest.raises(TrainingError, match=r"not finite|is nan|is inf") as caught:
        train(small_dataset, algorithm="base", epochs=3, lr=1e30)
    assert "smaller learning rate than 1e+30" in str(caught.value)
    assert "epoch" in str(caught.value)


def test_a_folder_of_another_run_is_refused(
    small_dataset: DomainDataset, dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    train(small_dataset, epochs=1, out=tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    # The same values, for which another network is chosen.
    gaps = dataclasses.replace(small_dataset, info=dataclasses.replace(small_dataset.info, settings={"missing": True}))
    for data, options in (
        (dataset_of(patients=14), {}), (gaps, {}), (small_dataset, {"lr": 0.1}), (small_dataset, {"seed": 1})
    ):  # fmt: skip
        with pytest.raises(StorageError, match="name another folder"):
            train(data, epochs=1, out=tmp_path, **options)
    assert (tmp_path / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"lr": 0}, "lr is 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**40}, "seed is"),
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"selection": "auroc"}, "unknown selection metric"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    small_dataset: DomainDataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(small_dataset, **options)


def test_patients_of_one_class_teach_nothing(small_dataset: DomainDataset) -> None:
    x, who = small_dataset.column("x"), small_dataset.domains
    data = from_arrays(x, np.zeros(len(x), int), who, names=["a", "b"], kind="classes")
    with pytest.raises(DataError, match="one class \\('a'\\)"):
        train(data, epochs=1)


def test_two_patients_cannot_be_split(dataset_of: Callable[..., DomainDataset]) -> None:
    with pytest.raises(DataError, match="the dataset has 2 patient"):
        train(dataset_of(patients=2), epochs=1)


def test_patients_with_one_sample_each_are_trained_on(dataset_of: Callable[..., DomainDataset]) -> None:
    run = train(dataset_of(patients=60, samples=1), epochs=2)
    assert set(run.record.history[0].losses) == {"supervised", "mmd"}


@pytest.mark.filterwarnings("ignore::manydg.errors.ManyDGWarning")
@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS.names()) - {"sagnet", "mixstyle", "gpboost"}))
def test_any_batch_size_and_number_of_samples_will_do(dataset_of: Callable[..., DomainDataset], algorithm: str) -> None:
    for patients, samples, batch in ((23, 1, 2), (11, 3, 4), (10, 3, 5)):
        run = train(dataset_of(patients=patients, samples=samples), algorithm=algorithm, epochs=1, batch_size=batch)
        assert run.record.status == "ok"


def test_the_schema_of_a_run_is_that_of_its_data(small_dataset: DomainDataset) -> None:
    assert train(small_dataset, epochs=1).schema == InputSchema.of(small_dataset)


def test_a_run_on_values_predicts_in_their_unit_and_opens_the_same(
    dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    data = dataset_of("regression", patients=20, samples=8)
    run = train(data, algorithm="manydg", epochs=12, lr=5e-3, batch_size=32, loss="huber", out=tmp_path / "run")
    assert list(run.record.test) == ["r2", "mae", "rmse"]
    assert run.record.test["r2"] > 0.3
    assert run.record.selection_rule == "epoch with the highest validation r2"
    predicted = run.predict_proba(data)
    assert predicted.shape == (160, 1)
    assert abs(float(predicted.mean()) - float(data.targets.mean())) < 5
    np.testing.assert_array_equal(open_run(tmp_path / "run").predict_proba(data), predicted)


def test_the_epoch_of_an_error_is_that_of_the_lowest(dataset_of: Callable[..., DomainDataset]) -> None:
    run = train(dataset_of("regression"), algorithm="base", epochs=6, lr=2e-2, batch_size=32, selection="mae")
    errors = [entry.val["mae"] for entry in run.record.history]
    assert errors[run.record.epoch - 1] == min(errors)
    assert min(errors) < max(errors)
    assert run.record.selection_rule == "epoch with the lowest validation mae"


def test_training_patients_of_one_value_are_nothing_to_learn_from(dataset_of: Callable[..., DomainDataset]) -> None:
    data = dataset_of("regression")
    split = draw_split(data, TrainingConfig())
    targets = data.targets.clone()
    targets[split.train] = 4.0
    with pytest.raises(DataError, match="training patients have the value 4: there is nothing to learn"):
        train(dataclasses.replace(data, targets=targets), algorithm="base", epochs=1)
