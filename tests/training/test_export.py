"""Exported models give the probabilities that the run gives, without the package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import torch

from manydg.algorithms import ALGORITHMS
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.timeline import PARTS
from manydg.errors import ConfigError, StorageError
from manydg.training.export import METADATA, export_run
from manydg.training.run import Run, open_run, train

Array = npt.NDArray[np.float32]
NEEDS_MAPS = ("mixstyle", "sagnet")
EXPORTABLE = [n for n in ALGORITHMS.names() if not ALGORITHMS.get(n).uses_patients]
NEEDS = {"onnx": ("onnxruntime", "onnxscript"), "torch": ()}


def run_exported(path: Path, format: str, columns: dict[str, torch.Tensor]) -> Array:
    """What an exported file gives, by its own runtime alone."""
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        taken = {entry.name for entry in session.get_inputs()}
        given = {name: column.numpy() for name, column in columns.items() if name in taken}
        return session.run(["probabilities"], given)[0]  # type: ignore[no-any-return]
    program = torch.export.load(path).module()
    return program(*columns.values()).detach().numpy()  # type: ignore[no-any-return]


def columns_of(run: Run, data: DomainDataset) -> dict[str, torch.Tensor]:
    prepared = run.prepare(data)
    return {name: prepared.column(name) for name in run.schema.columns}  # type: ignore[misc]


def skip_without(format: str) -> None:
    for package in NEEDS[format]:
        pytest.importorskip(package, reason=f"ONNX export needs {package}: pip install 'manydg[onnx]'")


def assert_parity(run: Run, data: DomainDataset, path: Path, format: str) -> None:
    """The same probabilities for all rows together, for a few and for one alone."""
    columns, expected = columns_of(run, data), run.predict_proba(data)
    for rows in (slice(None), slice(3, 8), slice(5, 6)):
        found = run_exported(path, format, {name: column[rows] for name, column in columns.items()})
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected[rows], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def nights() -> DomainDataset:
    """Two channels of half a minute at 100 Hz, with a rhythm of its own for each class."""
    rng = np.random.default_rng(0)
    who, label = np.repeat(np.arange(10), 5), rng.integers(0, 3, 50)
    time = np.arange(3000) / 100
    rhythm = np.sin(2 * np.pi * np.array([2.0, 10.0, 20.0])[label][:, None] * time)[:, None]
    signal = 20 * rhythm + 10 * rng.normal(size=(50, 2, 3000))
    info = {"settings": {"rate": 100.0, "channels": ["a", "b"], "unit": "uV"}}
    return from_arrays({"signal": signal.astype(np.float32)}, label, who, kind="classes", info=info)


@pytest.mark.parametrize("format", ["onnx", "torch"])
@pytest.mark.parametrize("algorithm", ["manydg", "base", "ema", "pcl", "boosting", "manydg-context"])
def test_an_exported_table_model_gives_the_runs_probabilities(
    small_dataset: DomainDataset, tmp_path: Path, algorithm: str, format: str
) -> None:
    skip_without(format)
    run = train(small_dataset, algorithm=algorithm, epochs=2, lr=0.01, device="cpu", out=tmp_path / "run")
    written = export_run(tmp_path / "run", tmp_path / "model", format, context="inputs")
    assert_parity(run, small_dataset, written.path, format)
    assert written.difference < 1e-4
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["model"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EXPORTABLE)
def test_every_algorithm_can_be_exported(
    dataset_of: Callable[..., DomainDataset], nights: DomainDataset, tmp_path: Path, algorithm: str
) -> None:
    skip_without("onnx")
    data = nights if algorithm in NEEDS_MAPS else dataset_of("binary" if algorithm == "gpboost" else "classes", 30)
    run = train(data, algorithm=algorithm, epochs=1, device="cpu")
    for format in ("onnx", "torch"):
        assert_parity(run, data, export_run(run, tmp_path / format, format, context="inputs").path, format)


@pytest.mark.parametrize("kind", ["votes", "binary", "multilabel"])
def test_every_kind_of_target_comes_out_as_probabilities(
    dataset_of: Callable[..., DomainDataset], tmp_path: Path, kind: str
) -> None:
    skip_without("onnx")
    data = dataset_of(kind, patients=20)
    run = train(data, epochs=2, lr=0.01, device="cpu")
    assert_parity(run, data, export_run(run, tmp_path / "model.onnx").path, "onnx")


def with_gaps(data: DomainDataset) -> DomainDataset:
    values = data.column("x").clone()  # type: ignore[union-attr]
    values[::3, 1] = torch.nan
    values[1::4, 2] = torch.nan
    return from_arrays(values, data.targets, data.domains.tolist(), kind="classes", missing=True)


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_an_exported_model_decides_nothing_on_what_is_not_finite(
    dataset_of: Callable[..., DomainDataset], tmp_path: Path, format: str
) -> None:
    skip_without(format)
    data = dataset_of("multilabel")
    run = train(data, algorithm="base", epochs=1, device="cpu", out=tmp_path / "run")
    path = export_run(run, tmp_path / "model", format).path
    columns = columns_of(run, data)
    (name, values), *_ = columns.items()
    values = values[:4].clone()
    values[0].flatten()[0], values[1].flatten()[0] = torch.inf, -torch.inf
    values[2] = 3e38
    found = run_exported(path, format, {**columns, name: values})
    # The third row overflows in the network, and a sigmoid would make certainty of that.
    assert np.isnan(found[:3]).all()
    assert np.isfinite(found[3]).all()


@pytest.mark.parametrize("format", ["onnx", "torch"])
@pytest.mark.parametrize("algorithm", ["manydg", "boosting"])
def test_missing_values_go_the_same_way_in_an_exported_model(
    small_dataset: DomainDataset, tmp_path: Path, algorithm: str, format: str
) -> None:
    skip_without(format)
    data = with_gaps(small_dataset)
    run = train(data, algorithm=algorithm, epochs=2, lr=0.01, device="cpu")
    assert_parity(run, data, export_run(run, tmp_path / "model", format).path, format)


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_the_spectrogram_is_inside_the_exported_graph(nights: DomainDataset, tmp_path: Path, format: str) -> None:
    skip_without(format)
    run = train(nights, epochs=1, batch_size=16, device="cpu")
    written = export_run(run, tmp_path / "model", format)
    assert written.metadata["inputs"] == {"signal": {"dtype": "float32", "shape": ["batch", 2, 3000]}}
    assert written.metadata["settings"]["unit"] == "uV"
    assert_parity(run, nights, written.path, format)


def test_a_centred_spectrogram_can_be_exported_too(tmp_path: Path) -> None:
    skip_without("onnx")
    rng = np.random.default_rng(0)
    signal = (30 * rng.normal(size=(40, 16, 2000))).astype(np.float32)
    data = from_arrays({"signal": signal}, np.arange(40) % 2, np.repeat(np.arange(10), 4), kind="classes")
    run = train(data, epochs=1, batch_size=16, device="cpu")
    assert run.record.config.backbone == "seizure-cnn"
    assert_parity(run, data, export_run(run, tmp_path / "model.onnx").path, "onnx")


def test_a_torch_program_runs_where_the_package_is_not_installed(small_dataset: DomainDataset, tmp_path: Path) -> None:
    run = train(small_dataset, epochs=1, device="cpu")
    path = export_run(run, tmp_path / "model.pt2", "torch").path
    np.save(tmp_path / "x.npy", columns_of(run, small_dataset)["x"].numpy())
    program = f"""
import sys
sys.modules["manydg"] = None  # importing it would fail
import numpy, torch
extra = {{"{METADATA}": ""}}
model = torch.export.load({str(path)!r}, extra_files=extra).module()
numpy.save({str(tmp_path / "y.npy")!r}, model(torch.from_numpy(numpy.load({str(tmp_path / "x.npy")!r}))).detach())
print(extra["{METADATA}"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), run.predict_proba(small_dataset), atol=1e-4)
    assert json.loads(done.stdout)["target"]["names"] == list(small_dataset.target.names)


def test_an_onnx_file_says_what_its_classes_are_and_nothing_of_patients(
    small_dataset: DomainDataset, tmp_path: Path
) -> None:
    skip_without("onnx")
    import onnxruntime

    run = train(small_dataset, epochs=1, device="cpu", out=tmp_path / "run")
    path = export_run(run, tmp_path / "model.onnx").path
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    said = json.loads(session.get_modelmeta().custom_metadata_map["manydg"])
    assert said["target"] == run.record.to_json()["target"]
    assert said["run"] == run.record.run
    assert session.get_inputs()[0].shape == ["batch", 6]
    assert session.get_outputs()[0].shape == ["batch", 3]
    assert not any(alias.encode() in path.read_bytes() for alias in run.record.per_patient)


@pytest.mark.parametrize("algorithm", [n for n in ALGORITHMS.names() if ALGORITHMS.get(n).uses_patients])
def test_a_model_that_needs_whole_patients_is_refused(
    small_dataset: DomainDataset, tmp_path: Path, algorithm: str
) -> None:
    run = train(small_dataset, algorithm=algorithm, epochs=1, device="cpu")
    with pytest.raises(ConfigError, match="all of a patient's samples together"):
        export_run(run, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("context", ["state", "inputs"])
def test_a_model_that_reads_its_classes_in_order_is_refused(tmp_path: Path, context: str) -> None:
    rows = np.arange(240)
    values = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32).repeat(2, axis=0)
    data = from_arrays(values, values[:, 0] > 0, rows // 10, times=rows % 10)
    run = train(data, algorithm="best", sequence="chain", context="causal", epochs=1, device="cpu")
    with pytest.raises(ConfigError, match="whole sessions in order"):
        export_run(run, tmp_path / "model.onnx", context=context)


def test_a_model_of_ragged_rows_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [[[1, 2 + row], [3]][: 1 + row % 2] for row in range(24)]
    columns: dict[str, Any] = {
        "diagnoses": Ragged.from_rows(rows),
        "procedures": Ragged.from_rows(rows),
        "history_drugs": Ragged(Ragged.from_rows([[0, 1]] * 12), torch.arange(25) // 2),
    }
    words = {
        "diagnoses": [str(code) for code in range(26)],
        "procedures": [str(code) for code in range(26)],
        "drugs": list("xyz"),
    }
    data = from_arrays(
        columns, rng.integers(0, 2, (24, 3)), np.repeat(np.arange(8), 3), kind="multilabel",
        info={"vocabularies": words},
    )  # fmt: skip
    run = train(data, epochs=1, device="cpu")
    with pytest.raises(ConfigError, match="rows of different lengths"):
        export_run(run, tmp_path / "model.onnx")


def test_an_export_never_replaces_a_folder_and_knows_its_formats(small_dataset: DomainDataset, tmp_path: Path) -> None:
    run = train(small_dataset, epochs=1, device="cpu")
    with pytest.raises(StorageError, match="is a folder"):
        export_run(run, tmp_path, "torch")
    with pytest.raises(ConfigError, match="did you mean 'onnx'"):
        export_run(run, tmp_path / "model", "onn")


def test_the_command_exports_a_run(commands: Any, small_dataset: DomainDataset, tmp_path: Path) -> None:
    train(small_dataset, epochs=1, device="cpu", out=tmp_path / "run")
    run = open_run(tmp_path / "run")
    out = tmp_path / "model.pt2"
    code, printed, err = commands.run("export", tmp_path / "run", "--format", "torch", "--out", out)
    assert code == 0, err
    assert "input x: float32 (batch, 6)" in printed
    assert_parity(run, small_dataset, out, "torch")
    by_ending = tmp_path / "by-ending.pt2"
    code, _, err = commands.run("export", tmp_path / "run", "--out", by_ending)
    assert code == 0, err
    assert_parity(run, small_dataset, by_ending, "torch")
    code, _, err = commands.run("export", tmp_path / "nothing", "--out", out)
    assert code == 2
    assert "is not a finished run" in err


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_values_leave_in_their_unit(format: str, dataset_of: Callable[..., DomainDataset], tmp_path: Path) -> None:
    skip_without(format)
    data = dataset_of("regression")
    # In a small unit an absolute tolerance would be one of nothing.
    data = from_arrays(data.column("x"), 1e6 * data.targets, data.domains, kind="regression", names=["seconds"])
    run = train(data, algorithm="manydg", epochs=2, out=tmp_path / "run")
    exported = export_run(tmp_path / "run", tmp_path / "model", format)
    assert list(exported.metadata["output"]) == ["values"]
    columns, expected = columns_of(run, data), run.predict_proba(data)
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
        found = session.run(["values"], {name: column.numpy() for name, column in columns.items()})[0]
    else:
        found = run_exported(exported.path, format, columns)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert float(found.mean()) > 1e7


# Context inside the graph


@pytest.fixture(scope="module")
def stays() -> DomainDataset:
    """Patients with values that are often missing, samples of equal times, and pauses that begin a session."""
    rng = np.random.default_rng(0)
    who, hour = np.repeat(np.arange(16), 20), np.tile(np.floor(np.arange(20) * 0.7), 16)
    values = (rng.normal(size=(320, 18)) + 3 * rng.normal(size=(16, 18))[who]).astype(np.float32)
    label = values[:, 0] > 0
    values[rng.random(values.shape) < 0.4] = np.nan
    return from_arrays(values, label, who, times=np.where(hour > 8, hour + 10, hour), missing=True)


def streamed(run: Callable[..., list[Array]], data: DomainDataset, size: int, batch: int = 1) -> Array:
    """Probabilities of samples given in the order of time, patients interleaved, some of them at once."""
    values, times, who = data.column("x").numpy(), data.times.numpy(), data.domains.numpy()  # type: ignore[union-attr]
    states: dict[int, Array] = {}
    out, waiting = np.empty((len(data), 2), np.float32), [int(row) for row in np.argsort(times, kind="stable")]
    while waiting:
        rows: list[int] = []
        for row in waiting:
            if len(rows) < batch and who[row] not in who[rows]:
                rows.append(row)
        waiting = [row for row in waiting if row not in rows]
        state = np.stack([states.get(int(who[row]), np.zeros(size)) for row in rows])
        out[rows], state = run(values[rows], times[rows], state)
        states |= {int(who[row]): one for row, one in zip(rows, state, strict=True)}
    return out


def runtime(path: Path, format: str) -> Callable[..., list[Array]]:
    """A file with a state as a function of arrays."""
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        assert [entry.name for entry in session.get_outputs()] == ["probabilities", "new_state"]
        return lambda x, time, state: session.run(None, {"x": x, "time": time, "state": state})
    program = torch.export.load(path).module()
    return lambda *given: [each.detach().numpy() for each in program(*map(torch.from_numpy, given))]


EVERYTHING = {"parts": PARTS["causal"], "gap": 5.0, "scales": (2, 8)}


@pytest.mark.parametrize(
    ("format", "algorithm", "options"),
    [
        ("onnx", "base", EVERYTHING),
        pytest.param("torch", "base", EVERYTHING, marks=pytest.mark.slow),
        pytest.param("onnx", "boosting", {}, marks=pytest.mark.slow),
        pytest.param("onnx", "base", {"parts": ("relative",)}, marks=pytest.mark.slow),
    ],
)
def test_samples_one_by_one_get_from_the_file_what_the_run_gives_them_together(
    stays: DomainDataset, tmp_path: Path, format: str, algorithm: str, options: dict[str, Any]
) -> None:
    skip_without(format)
    run = train(stays, algorithm=algorithm, context="causal", context_options=options, epochs=2, device="cpu")
    written = export_run(run, tmp_path / "model", format)
    size, expected = written.metadata["inputs"]["state"]["shape"][1], run.predict_proba(stays)
    for batch in (1, 7):
        found = streamed(runtime(written.path, format), stays, size, batch)
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=0)
    without = run.predict_proba(stays.column("x"), patients=np.arange(len(stays)), times=stays.times.numpy())  # type: ignore[union-attr]
    assert np.abs(without - expected).max() > 0.01  # The context counts.


def test_the_state_starts_at_zero_is_documented_and_refuses_what_is_late_or_infinite(
    stays: DomainDataset, tmp_path: Path
) -> None:
    run = train(stays, algorithm="base", context="causal", epochs=1, device="cpu")
    written = export_run(run, tmp_path / "model.pt2", "torch")
    said, size = written.metadata["state"], written.metadata["inputs"]["state"]["shape"][1]
    assert said["initial"] == "zeros"
    ends = [field["start"] + int(np.prod(field["shape"])) for field in said["fields"]]
    assert [field["start"] for field in said["fields"]] == [0, *ends[:-1]]
    assert ends[-1] == size == written.metadata["output"]["new_state"][1]
    predict, x = runtime(written.path, "torch"), stays.column("x").numpy()  # type: ignore[union-attr]
    _, state = predict(x[:1], np.array([5.0]), np.zeros((1, size)))
    samples = {field["name"]: state[0, field["start"]] for field in said["fields"]}
    assert (samples["time"], samples["samples"], samples["samples_before"]) == (5.0, 1.0, 0.0)
    endless = np.where(np.arange(18) == 3, np.inf, x[1:2]).astype(np.float32)
    for row, time in ((x[1:2], 4.0), (x[1:2], np.nan), (endless, 6.0)):
        refused, same = predict(row, np.array([time]), state)
        assert np.isnan(refused).all()
        np.testing.assert_array_equal(same, state)
    again, after = predict(x[1:2], np.array([5.0]), state)
    assert np.isfinite(again).all()
    assert after[0, said["fields"][0]["start"]] == 5.0


def test_context_that_cannot_be_streamed_is_refused_with_the_remedy(
    stays: DomainDataset, tmp_path: Path, nights: DomainDataset
) -> None:
    offline = train(stays, algorithm="base", context="offline", epochs=1, device="cpu")
    with pytest.raises(ConfigError, match="later samples; train with --context causal, or export with --context inp"):
        export_run(offline, tmp_path / "model.pt2", "torch")
    assert not (tmp_path / "model.pt2").exists()
    timed = from_arrays(
        {"signal": nights.column("signal")}, nights.targets, nights.domains, kind="classes",
        times=np.tile(np.arange(5.0), 10), info={"settings": dict(nights.info.settings)},
    )  # fmt: skip
    signals = train(timed, algorithm="base", context="causal", epochs=1, batch_size=16, device="cpu")
    with pytest.raises(ConfigError, match=r"context of signals \(signal\) is made of their spectrograms; export with"):
        export_run(signals, tmp_path / "signals.pt2", "torch")
    with pytest.raises(ConfigError, match="did you mean 'state'"):
        export_run(offline, tmp_path / "model.pt2", "torch", context="stat")


@pytest.mark.slow
def test_the_hourly_kidney_table_streams_through_onnx(shared_data: Path, tmp_path: Path) -> None:
    skip_without("onnx")
    hourly = shared_data / "aki_hourly_eicu_demo"
    if not hourly.is_dir():
        pytest.skip("the hourly kidney table is not there")
    hours = pl.read_parquet(hourly / "dyn.parquet").join(
        pl.read_parquet(hourly / "outc.parquet"), on=["stay_id", "time"], how="inner"
    )
    few = hours["stay_id"].unique().sort()[:40].implode()
    hours = hours.filter(pl.col("stay_id").is_in(few)).sort("stay_id", "time")
    counts = hours.drop("stay_id", "time", "label").count().row(0, named=True)
    measured = pl.col(sorted(counts, key=lambda name: -counts[name])[:24])
    # Hours without a measurement are the same of everybody, which training warns of.
    hours = hours.filter(pl.sum_horizontal(measured.is_not_null()) > 3)
    values = hours.select(measured).cast(pl.Float32).fill_null(float("nan")).to_numpy().copy()
    when = (hours["time"].dt.total_minutes() / 60).to_numpy().copy()
    data = from_arrays(values, hours["label"].to_numpy() > 0, hours["stay_id"].to_numpy(), times=when, missing=True)
    run = train(data, algorithm="boosting", context="causal", settings={"rounds": 40}, device="cpu")
    assert "last" in run.schema.settings["context"]["parts"]  # type: ignore[operator, index, call-overload]
    written = export_run(run, tmp_path / "model.onnx")
    found = streamed(runtime(written.path, "onnx"), data, written.metadata["inputs"]["state"]["shape"][1], batch=8)
    np.testing.assert_allclose(found, run.predict_proba(data), atol=1e-6, rtol=0)
