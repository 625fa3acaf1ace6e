"""Finished runs reach an MLflow tracker once, with settings and metrics and nothing of patients."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

import manydg
from manydg.cli import app
from manydg.config import TrainingConfig
from manydg.data.info import TargetSpec
from manydg.errors import ConfigError, StorageError
from manydg.studies.tracking import Tracker
from manydg.training.record import Counts, EpochEntry, RunRecord


def record(seed: int = 0, **more: object) -> RunRecord:
    history = tuple(EpochEntry(epoch, {"supervised": 1 / epoch}, {"kappa": epoch / 10}, 2.0) for epoch in (1, 2, 3))
    return RunRecord(
        run=f"0123456789abcde{seed}", algorithm="base", seed=seed, dataset="stays", config=TrainingConfig("base"),
        target=TargetSpec("classes", ("a", "b", "c")), patients=Counts(60, 20, 20), samples=Counts(6, 2, 2), epoch=2,
        epochs=3, val={"kappa": 0.2}, test={"kappa": 0.25, "accuracy": None}, history=history, seconds=12.0,
        per_patient={"P-0123456789": {"kappa": 0.9}}, selection_rule="epoch with the highest validation kappa",
    ).replace(**more)  # fmt: skip


def logged(uri: str) -> None:
    """Log two runs twice, and see that each is there once and whole."""
    tracker = Tracker.of(f"mlflow:{uri}")
    assert tracker.log([record(0), record(1), record(2, status="failed")]) == 2
    assert tracker.log([record(0), record(1)]) == 0
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("manydg: stays")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["base, seed 0", "base, seed 1"]
    run = next(run for run in runs if run.data.tags["manydg.run"].endswith("0"))
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm"] == "base"
    assert run.data.params["patients.train"] == "60"
    assert run.data.metrics["test_kappa"] == 0.25
    assert run.data.metrics["val_kappa"] == 0.2  # the chosen epoch's, not the last one's
    assert "test_accuracy" not in run.data.metrics
    curve = client.get_metric_history(run.info.run_id, "val_kappa")
    assert [point.value for point in sorted(curve, key=lambda point: point.step)][:3] == [0.1, 0.2, 0.3]
    assert "P-0123456789" not in str(run.to_dictionary())


def installed_server(folder: Path) -> str:
    """MLflow's program: that of MLFLOW_SERVER, or one installed into an environment of its own.

    The client (mlflow-skinny) is installed here; the server asks for an older pyarrow than ours.
    """
    if given := os.environ.get("MLFLOW_SERVER"):
        return given
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    wanted = f"mlflow=={version('mlflow-skinny')}"
    done = subprocess.run([programs / "pip", "install", "--quiet", wanted], capture_output=True, text=True)
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        pytest.skip(f"{wanted} cannot be installed here ({reason}): name a server's program in MLFLOW_SERVER")
    return str(programs / "mlflow")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    program = installed_server(tmp_path / "server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}", "--default-artifact-root", str(tmp_path)]
    command = [program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, cwd=tmp_path, env=clean, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    uri = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{uri}/health", timeout=2)
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.5)
        yield uri
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_a_real_server_has_each_run_once_and_whole(server: str, tmp_path: Path) -> None:
    logged(server)
    x = np.random.default_rng(0).normal(size=(240, 3))
    manydg.from_arrays(x, x[:, 0] > 0, np.repeat(np.arange(24), 10)).save(tmp_path / "table")
    command = ["compare", str(tmp_path / "table"), "--algorithms", "base,boosting", "--seeds", "2", "--epochs", "1"]
    command += ["--out", str(tmp_path / "results"), "--device", "cpu", "--log", f"mlflow:{server}"]
    for _ in range(2):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name("manydg: table")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 4


def test_a_tracker_that_does_not_answer_is_named_before_anything_is_trained() -> None:
    with pytest.raises(StorageError, match=r"the tracker http://127\.0\.0\.1:9 cannot be used"):
        Tracker.of("mlflow:http://127.0.0.1:9")


@pytest.mark.parametrize("text", ["wandb:x", "mlflow:", "http://127.0.0.1:5000"])
def test_another_kind_of_tracker_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"takes mlflow:URI, such as mlflow:http://127\.0\.0\.1:5000"):
        Tracker.of(text)
