"""Runs of sequence models: what they learn, what may reach a prediction, and what they refuse."""

from __future__ import annotations

import csv
import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from manydg.algorithms import ALGORITHMS
from manydg.algorithms.best import candidates
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, InputSchema, from_arrays
from manydg.errors import ConfigError, ManyDGWarning
from manydg.estimator import ManyDGClassifier
from manydg.training import fit as fitting
from manydg.training.export import export_run
from manydg.training.inference import embed_dataset, read_calibration, with_context
from manydg.training.run import Run, open_run, train

SMALL = {"crop": 10, "width": 8, "layers": 1}
CONFIG = TrainingConfig(
    "base", backbone="mlp", backbone_options={"hidden": 8, "width": 8}, epochs=2, batch_size=64, sequence="gru",
    sequence_options=SMALL, lr=1e-2,
)  # fmt: skip


def nights(patients: int = 16, seed: int = 0) -> DomainDataset:
    """The label is what was measured one sample before: only who remembers it can tell."""
    rng = np.random.default_rng(seed)
    who, hour = np.repeat(np.arange(patients), 40), np.tile(np.arange(40), patients)
    times = np.where(hour < 20, hour, hour + 1000).astype(float)
    values = rng.normal(size=(len(who), 2))
    labels = np.r_[False, values[:-1, 0] > 0].astype(int)
    shuffled = rng.permutation(len(who))
    info: Any = {"settings": {"session_gap": 500.0}}
    return from_arrays(values[shuffled], labels[shuffled], who[shuffled], times=times[shuffled], info=info)


@pytest.fixture(scope="module")
def data() -> DomainDataset:
    return nights()


@pytest.fixture(scope="module", params=["offline", "causal"])
def run(request: Any, data: DomainDataset, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = CONFIG.replace(epochs=12, sequence_options={**SMALL, "direction": request.param})
    return train(data, config, out=tmp_path_factory.mktemp("runs") / request.param, device="cpu")


def with_inputs(data: DomainDataset, rows: np.ndarray) -> DomainDataset:
    values = data.columns["x"].clone()  # type: ignore[union-attr]
    values[rows] = 5.0 - values[rows]
    return dataclasses.replace(data, columns={"x": values})


def test_it_learns_what_no_single_sample_tells(run: Run, data: DomainDataset) -> None:
    alone = train(data, CONFIG.replace(epochs=12, sequence="none", sequence_options={}), device="cpu")
    assert run.record.test["auroc"] > 0.9
    assert alone.record.test["auroc"] < 0.65  # type: ignore[operator]


def test_only_the_session_and_causally_only_what_was_before_reaches_a_prediction(run: Run, data: DomainDataset) -> None:
    who, times = data.domains.numpy(), data.times.numpy()  # type: ignore[union-attr]
    changed = (who == 3) & (times >= 10)
    before, after = run.predict_proba(data), run.predict_proba(with_inputs(data, changed))
    moved = np.abs(before - after).max(axis=1) > 1e-6
    assert not moved[who != 3].any()
    earlier = moved[(who == 3) & (times < 10)]
    assert not earlier.any() if run.record.context["mode"] == "causal" else earlier.any()  # type: ignore[index]
    session = (who == 3) & (times >= 1000)
    first_alone = run.predict_proba(data.select(torch.from_numpy(session)))
    np.testing.assert_allclose(first_alone, before[session], atol=1e-6)


def test_labels_and_the_order_of_rows_do_not_matter(run: Run, data: DomainDataset) -> None:
    flipped = dataclasses.replace(data, targets=1 - data.targets)
    np.testing.assert_array_equal(run.predict_proba(data), run.predict_proba(flipped))
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(run.predict_proba(data.select(rows)), run.predict_proba(data)[rows.numpy()], atol=1e-6)


def test_an_opened_run_predicts_the_same_and_says_how_it_reads(run: Run, data: DomainDataset) -> None:
    assert run.folder is not None
    opened = open_run(run.folder)
    np.testing.assert_array_equal(opened.predict_proba(data), run.predict_proba(data))
    sequence: Any = opened.record.context["sequence"]  # type: ignore[index]
    assert sequence == {
        **SMALL,
        "kind": "gru",
        "direction": sequence["direction"],
        "dropout": 0.3,
        "gap": 500.0,
        "pause": 1.0,
    }
    assert opened.record.config.backbone == "mlp"


def test_the_reference_of_training_patients_is_made_of_whole_sessions(run: Run, data: DomainDataset) -> None:
    assert run.folder is not None
    calibration = read_calibration(run.folder)
    assert calibration is not None
    assert calibration.reference is not None
    split = data.select(torch.from_numpy(np.isin(data.domains.numpy(), np.arange(3))))
    embeddings = embed_dataset(run.algorithm, run.prepare(split))["v"]
    assert embeddings.shape[1] == len(calibration.reference.mean)


@pytest.mark.parametrize(("kind", "layers"), [("transformer", 2), ("conv", 2)])
def test_the_other_readers_learn_it_too(data: DomainDataset, kind: str, layers: int) -> None:
    options = {**SMALL, "direction": "causal", "layers": layers, "width": 16, "dropout": 0.0}
    run = train(data, CONFIG.replace(epochs=12, sequence=kind, sequence_options=options), device="cpu")
    assert run.record.test["auroc"] > 0.9  # type: ignore[operator]


@pytest.mark.parametrize("algorithm", ["manydg", "ema", "arm", "manydg-context"])
def test_other_algorithms_train_on_crops(data: DomainDataset, algorithm: str) -> None:
    run = train(data, CONFIG.replace(algorithm=algorithm), device="cpu")
    assert np.isfinite(run.record.test["auroc"])  # type: ignore[arg-type]
    assert run.algorithm.backbone.crop == 10


@pytest.mark.filterwarnings("ignore:.*constant in the training patients")
def test_context_and_sequence_go_together(data: DomainDataset) -> None:
    run = train(data, CONFIG.replace(context="causal", epochs=1), device="cpu")
    context: Any = run.record.context
    assert context["mode"] == context["sequence"]["direction"] == "causal"
    assert run.predict_proba(data).shape == (len(data), 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "boosting"}, "reads each sample by itself"),
        ({"algorithm": "arm", "context": "causal"}, "later ones too"),
        (
            {"context": "offline", "sequence_options": {"direction": "causal"}},
            "context is offline and its sequence causal",
        ),
        ({"algorithm": "bn-adapt"}, "some samples at a time"),
        ({"sequence": "lstm"}, "lstm"),
        ({"sequence_options": {"length": 3}}, "length"),
        ({"sequence_options": {"crop": 1}}, "crop of a sequence is 1"),
    ],
)
def test_what_makes_no_sense_is_refused(data: DomainDataset, changes: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        train(data, CONFIG.replace(**changes), device="cpu")


def test_a_sequence_model_is_not_exported_and_the_reason_is_given(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads whole sessions in order"):
        export_run(run, tmp_path / "model.onnx")


def test_a_stopped_run_goes_on_to_the_same_weights(
    data: DomainDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.replace(algorithm="manydg", epochs=3)
    whole = train(data, config, device="cpu")
    step = fitting.TrainingLoop._run_epoch

    def stop_in_the_second(self: Any, epoch: int, worker: Any) -> None:
        if epoch == 2:
            raise KeyboardInterrupt
        step(self, epoch, worker)

    with monkeypatch.context() as patched:
        patched.setattr(fitting.TrainingLoop, "_run_epoch", stop_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            train(data, config, out=tmp_path / "run", device="cpu")
    again = train(data, config, out=tmp_path / "run", device="cpu")
    for name, weight in whole.algorithm.state_dict().items():
        assert torch.equal(weight, again.algorithm.state_dict()[name]), name


def test_every_algorithm_that_takes_a_backbone_says_whether_it_takes_a_sequence(data: DomainDataset) -> None:
    refused = set()
    for name in ALGORITHMS.names():
        try:
            fitting.fit(
                CONFIG.replace(algorithm=name, epochs=1, batch_size=1024),
                *(fitting_data(data, name),) * 2,
                torch.device("cpu"),
            )
        except ConfigError:
            refused.add(name)
    assert refused >= {"boosting", "bn-adapt", "mixstyle", "sagnet"}
    assert refused.isdisjoint({"base", "manydg", "manydg-random-pairs", "prototype", "irm", "groupdro", "swad"})


def fitting_data(data: DomainDataset, algorithm: str) -> DomainDataset:
    from manydg.training.inference import with_context

    return with_context(data, CONFIG.replace(algorithm=algorithm, context="none"), torch.device("cpu"))


def test_the_estimator_reads_in_the_order_of_times(tmp_path: Path) -> None:
    data = nights()
    X, y, who, times = data.columns["x"].numpy(), data.targets.numpy(), data.domains.numpy(), data.times.numpy()  # type: ignore[union-attr]
    model = ManyDGClassifier(
        "base", epochs=8, lr=1e-2, sequence="gru", sequence_options={**SMALL, "gap": 500.0}, random_state=0
    )
    model.fit(X, y, groups=who, times=times)
    assert (model.predict(X, groups=who, times=times) == y).mean() > 0.8
    with pytest.warns(ManyDGWarning, match="was not told which samples are of one patient"):
        assert (model.predict(X) == y).mean() < 0.7
    with warnings.catch_warnings():
        warnings.simplefilter("error", ManyDGWarning)
        loaded = ManyDGClassifier.load(model.save(tmp_path).parent)
    np.testing.assert_array_equal(loaded.predict_proba(X, who, times), model.predict_proba(X, who, times))
    with pytest.raises(ValueError, match="time of every sample"):
        model.predict_proba(X, groups=who)


def test_through_the_command_a_later_row_changes_no_earlier_prediction(commands: Any, tmp_path: Path) -> None:
    data = nights(8)
    table = pl.DataFrame(
        {
            "who": data.domains.numpy(),
            "when": data.times.numpy() % 1000,  # type: ignore[union-attr]
            "night": (data.times.numpy() >= 1000).astype(int),  # type: ignore[union-attr]
            "a": data.columns["x"].numpy()[:, 0],  # type: ignore[union-attr]
            "b": data.columns["x"].numpy()[:, 1],  # type: ignore[union-attr]
            "y": data.targets.numpy(),
        }
    )
    table.write_csv(tmp_path / "rows.csv")
    late = (pl.col("who") == 2) & (pl.col("night") == 1) & (pl.col("when") >= 5)
    new = table.with_columns(a=pl.when(late).then(9.0).otherwise(pl.col("a")), y=1 - pl.col("y"))
    new.write_csv(tmp_path / "changed.csv")
    roles = ["--patient", "who", "--target", "y", "--time", "when", "--session", "night", "--features", "a", "b"]

    def run(*arguments: Any) -> None:
        code, _, err = commands.run(*arguments)
        assert code == 0, err

    run("prepare", "table", tmp_path / "rows.csv", *roles, "--out", tmp_path / "data")
    options = ["--sequence", "gru", "--sequence-option", "direction=causal", "--sequence-option", "width=8"]
    run(
        "train", tmp_path / "data", "--algorithm", "base", "--epochs", 2, *options, "--out", tmp_path / "run",
        "--device", "cpu",
    )  # fmt: skip
    found = []
    for name in ("rows", "changed"):
        run("predict", tmp_path / "run", tmp_path / f"{name}.csv", "--out", tmp_path / name)
        with (tmp_path / name / "predictions.csv").open() as file:
            found.append([float(row["p_1"]) for row in csv.DictReader(file)])
    moved = np.abs(np.array(found[0]) - np.array(found[1])) > 1e-6
    is_late = table.select(late).to_series().to_numpy()
    assert not moved[~is_late].any()
    assert moved[is_late].all()


def sessions_of(short: int) -> DomainDataset:
    """Twelve patients, each with a session of 14 to 18 samples of one class and one of ``short`` of the other."""
    rng, rows = np.random.default_rng(0), []
    for patient in range(12):
        for label in (0, 1):
            length = short if label else int(rng.integers(14, 19))
            rows += [(patient, label, 1000 * label + second) for second in range(length)]
    who, labels, times = np.array(rows).T
    settings: Any = {"settings": {"session_gap": 100.0}}
    return from_arrays(rng.normal(size=(len(who), 2)), labels, who, times=times.astype(float), info=settings)


@pytest.mark.parametrize(("short", "warned"), [(6, True), (16, False)])
def test_sessions_whose_length_tells_the_class_are_warned_of(short: int, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ManyDGWarning)
        train(sessions_of(short), CONFIG.replace(epochs=1), device="cpu")
    assert any("by counting" in str(warning.message) for warning in caught) == warned


@pytest.mark.parametrize(("short", "left_out"), [(6, True), (16, False)])
def test_best_reads_no_sessions_whose_length_tells_the_class(short: int, left_out: bool) -> None:
    best = CONFIG.replace(algorithm="best", sequence="none", sequence_options={})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ManyDGWarning)
        data = with_context(sessions_of(short), best, torch.device("cpu"))
    sequence = data.info.settings["sequence"]
    assert isinstance(sequence, Mapping)
    assert sequence["kind"] == ("chain" if left_out else "gru")
    networks = [one for one in candidates(InputSchema.of(data)) if "sequence" in one.options]
    assert bool(networks) != left_out
    assert any("best leaves sequence models out" in str(warning.message) for warning in caught) == left_out
