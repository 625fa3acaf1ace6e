"""Studies on a real Ray cluster of two nodes: the same results as on this machine, also when a node is lost."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError
from manydg.jobs import Job, LocalEngine, RayEngine, WorkerLostError, engine_named, using
from manydg.studies.conduct import compare
from manydg.training.record import read_tensors

ray = pytest.importorskip("ray", reason="the Ray engine needs ray: pip install 'manydg[ray]'")
PASSING = ("integrity", "seconds", "first_use_seconds", "predict_seconds", "peak_memory_mb", "history")


@pytest.fixture(scope="module")
def dataset(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset_of(patients=16, samples=8).save(tmp_path_factory.mktemp("ray") / "data")


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    cluster.second = cluster.add_node(num_cpus=1, num_gpus=0, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def told(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what the clock and the memory of a machine decide."""
    history = [{key: value for key, value in entry.items() if key != "seconds"} for entry in record["history"]]
    return {**{key: value for key, value in record.items() if key not in PASSING}, "history": history}


def wait_for(condition: Callable[[], bool], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_study_on_two_nodes_of_which_one_is_killed_has_the_results_of_this_machine(
    commands: Any, dataset: Path, tmp_path: Path, two_nodes: Any
) -> None:
    arguments = [
        "compare", dataset, "--algorithms", "base,manydg", "--seeds", 2, "--epochs", 60, "--batch-size", 16,
        "--device", "cpu", "--out",
    ]  # fmt: skip
    code, _, err = commands.run(*arguments, tmp_path / "local")
    assert code == 0, err
    study = commands.start(*arguments, tmp_path / "ray", "--engine", "ray", "--address", two_nodes.address)

    def under_way() -> list[Path]:
        return list((tmp_path / "ray" / "runs").glob("*/checkpoint.safetensors"))

    # Each node has room for one run, so that with two under way one is on the node that is lost now.
    wait_for(lambda: len(under_way()) == 2)
    two_nodes.remove_node(two_nodes.second, allow_graceful=False)
    left = {path.parent.name: read_tensors(path)[1]["history"] for path in under_way()}
    code = study.wait()
    assert code == 0, study.err
    local, remote = (
        {record["run"]: record for record in map(json.loads, (tmp_path / side / "results.jsonl").open())}
        for side in ("local", "ray")
    )
    assert len(remote) == 4
    assert {key: told(record) for key, record in remote.items()} == {key: told(record) for key, record in local.items()}
    for key in local:
        model = Path("runs") / key / "model.safetensors"
        assert (tmp_path / "ray" / model).read_bytes() == (tmp_path / "local" / model).read_bytes()
    assert left
    for key, history in left.items():
        # The seconds of each epoch are of one training: those before the loss were not trained again.
        assert remote[key]["history"][: len(history)] == history
        assert len(history) < 60


@pytest.mark.slow
def test_a_study_on_a_cluster_of_this_machine_has_the_same_results(dataset: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "workers": 2}
    local = compare(dataset, ["base"], 2, tmp_path / "local", **options)
    with using(RayEngine(cpus=0.5)):
        remote = compare(dataset, ["base"], 2, tmp_path / "ray", **options)
        again = compare(dataset, ["base"], 2, tmp_path / "ray", **options)
    assert not ray.is_initialized()
    assert [told(record.to_json()) for record in remote] == [told(record.to_json()) for record in local]
    assert again == remote


def test_an_engine_that_is_not_there_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    assert isinstance(engine_named("local"), LocalEngine)
    with pytest.raises(ConfigError, match="did you mean 'ray'"):
        engine_named("rya")
    with pytest.raises(ConfigError, match="add --engine ray"):
        engine_named("local", address="auto")
    assert engine_named("ray", "auto", 2.0) == RayEngine("auto", 2.0)


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_one_line(commands: Any, dataset: Path, tmp_path: Path) -> None:
    code, _, err = commands.run("compare", dataset, "--engine", "ray", "--address", "auto", "--out", tmp_path / "out")
    assert code == 2
    assert "no Ray cluster answers at 'auto'" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_run_whose_worker_is_lost_again_and_again_stops_the_study(tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match="worker was lost"):
        list(RayEngine().run(_dies, [Job("one", (tmp_path,), 1)]))


def _dies(argument: int) -> None:
    os._exit(1)
