"""Several processes train the model that one process would have trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from manydg.algorithms import ALGORITHMS as REGISTRY
from manydg.algorithms import Algorithm, Optimizers, descend
from manydg.algorithms.base import Base
from manydg.backbones import build_backbone
from manydg.data.dataset import Batch, DomainDataset, InputSchema, from_arrays
from manydg.data.sampling import plan_epoch
from manydg.errors import ConfigError
from manydg.targets import target_of
from manydg.training.execution import AS_WRITTEN, DistributedSteps, Team, check_divisible, steps_for
from manydg.training.run import open_run, train

OPTIONS = ["--epochs", "3", "--batch-size", "16", "--lr", "0.01", "--device", "cpu", "--backbone-option", "dropout=0"]
INDIVISIBLE = (
    *("best", "boosting", "catboost", "condadv", "erasure", "gpboost", "lightgbm", "mixstyle", "mldg", "sagnet"),
)
ALGORITHMS = [name for name in REGISTRY.names() if name not in INDIVISIBLE]


def torchrun(arguments: list[str], processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a Python module or file in several real processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True, env=environment, timeout=300)
    return done


def uneven() -> DomainDataset:
    """Patients with one, two, three and more samples, so that some rows stand alone and shares differ in size."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(24), np.arange(24) % 7 + 1)
    label = rng.integers(0, 3, len(who))
    x = rng.normal(size=(3, 6))[label] + rng.normal(size=(24, 6))[who] * 0.5 + rng.normal(size=(len(who), 6)) * 0.3
    return from_arrays(x, label, who, kind="classes")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [5, 8, 17, 64])
def test_shares_hold_every_row_once_and_are_of_one_size(rows: int, size: int) -> None:
    teams = [Team(rank, size, torch.device("cpu")) for rank in range(size)]
    parts = [list(range(rows))[team.share(rows)] for team in teams]
    assert [row for part in parts for row in part] == list(range(rows))
    assert [len(part) for part in parts] == teams[0].share_sizes(rows)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def assert_same_weights(found: Algorithm, expected: Algorithm) -> None:
    """Nearly all weights agree closely.

    Not each of them: where the true gradient is zero (a bias right before batch normalisation, a unit that is off) Adam
    blows the rounding error up to whole steps.
    """
    for name, tensor in expected.state_dict().items():
        if name.endswith(".bias") or "running" in name:
            continue
        close = torch.isclose(found.state_dict()[name], tensor, atol=1e-4, rtol=1e-3).float().mean()
        assert float(close) > 0.99, name


def test_two_processes_reach_the_result_of_one(commands: Any, tmp_path: Path) -> None:
    uneven().save(tmp_path / "data")
    code, alone, err = commands.run("train", tmp_path / "data", *OPTIONS, "--out", tmp_path / "one")
    assert code == 0, err
    done = torchrun(["-m", "manydg", "train", str(tmp_path / "data"), *OPTIONS, "--out", str(tmp_path / "two")])
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone
    assert done.stderr.count("epoch   1/3") == 1
    one, two = open_run(tmp_path / "one"), open_run(tmp_path / "two")
    assert_same_weights(two.algorithm, one.algorithm)
    with (
        np.load(tmp_path / "one" / "predictions.npz") as first,
        np.load(tmp_path / "two" / "predictions.npz") as second,
    ):
        np.testing.assert_allclose(second["probabilities"], first["probabilities"], atol=1e-3)
        assert np.array_equal(first["row"], second["row"])
    assert two.record.processes == 2
    for before, after in zip(one.record.history, two.record.history, strict=True):
        assert after.losses == pytest.approx(before.losses, abs=1e-4)
        assert after.val == pytest.approx(before.val, abs=1e-6)
    assert {file.name for file in (tmp_path / "one").iterdir()} == {file.name for file in (tmp_path / "two").iterdir()}


SCRIPT = """
import json, sys
from manydg.data.dataset import open_dataset
from manydg.training.execution import joined
from manydg.training.run import train

data, out, names = open_dataset(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
with joined("cpu") as team:
    for name in names:
        settings = {"head_dropout": 0.0} if name == "tabm" else {}
        options = dict(settings=settings, backbone_options={"dropout": 0.0})
        train(data, algorithm=name, epochs=2, batch_size=16, lr=0.01, out=f"{out}/{name}", **options)
"""


@pytest.mark.slow
def test_losses_that_tie_rows_together_are_those_of_one_process(tmp_path: Path) -> None:
    data = uneven()
    data.save(tmp_path / "data")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = torchrun([str(tmp_path / "script.py"), str(tmp_path / "data"), str(tmp_path / "two"), ",".join(ALGORITHMS)])
    assert done.returncode == 0, done.stderr
    for name in ALGORITHMS:
        # Without dropout, whose random numbers processes draw for themselves.
        settings = {"head_dropout": 0.0} if name == "tabm" else {}
        options = {"settings": settings, "backbone_options": {"dropout": 0.0}}
        one = train(data, algorithm=name, epochs=2, batch_size=16, lr=0.01, device="cpu", **options)
        two = open_run(tmp_path / "two" / name)
        np.testing.assert_allclose(two.predict_proba(data), one.predict_proba(data), atol=2e-3, err_msg=name)
        assert two.record.history[-1].losses == pytest.approx(one.record.history[-1].losses, rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_what_processes_cannot_share_is_refused_with_the_reason(
    dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    dataset_of().save(tmp_path / "data")
    arguments = ["-m", "manydg", "train", str(tmp_path / "data"), "--algorithm", "mldg", "--out"]
    done = torchrun([*arguments, str(tmp_path / "run"), "--epochs", "1", "--device", "cpu"])
    assert done.returncode != 0
    assert "MLDG cannot be trained by several processes: its inner steps need gradients of single" in done.stderr
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("algorithm", INDIVISIBLE)
def test_every_algorithm_that_looks_past_the_backbone_says_why_it_is_not_shared(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="without torchrun"):
        check_divisible(REGISTRY.get(algorithm))


@pytest.mark.slow
def test_a_folder_of_another_run_stops_all_processes_with_one_reason(
    dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    dataset_of().save(tmp_path / "data")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "identity.json").write_text(json.dumps({"identity": "another"}))
    done = torchrun(
        ["-m", "manydg", "train", str(tmp_path / "data"), "--out", str(tmp_path / "run"), "--device", "cpu"]
    )
    assert done.returncode != 0
    assert "holds a run of other data" in done.stderr
    assert "process 0 had to stop" in done.stderr
    # The launcher shows where it stopped itself; our processes show no traceback.
    assert done.stderr.count("Traceback") == 1


@pytest.fixture
def team() -> Iterator[Team]:
    """A team of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Team(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def trained(kind: type[Algorithm], data: DomainDataset, team: Team | None) -> tuple[Algorithm, list[float]]:
    """An algorithm after an epoch of a team or of this process, and its losses."""
    torch.manual_seed(0)
    backbone = build_backbone("mlp", InputSchema.of(data), {"dropout": 0.0})
    backbone.fit_inputs(data)
    algorithm = kind(backbone, target_of(data.target), data.n_patients).train()
    optimizers, device = algorithm.optimizers(1e-2, 0.0), torch.device("cpu")
    plan = plan_epoch(algorithm.sampling, data.domains, 16, 0, 1)
    if team is None:
        plain = steps_for(algorithm, data, optimizers, device, AS_WRITTEN)
        return algorithm, [float(step().values.sum()) for step in plain.run(plan)]
    with DistributedSteps(team, algorithm, data, optimizers, device) as steps:
        return algorithm, [float(step().values.sum()) for step in steps.run(plan)]


def test_nothing_of_a_team_stays_on_the_algorithm(team: Team) -> None:
    data = uneven()
    (shared, losses), (alone, expected) = trained(Base, data, team), trained(Base, data, None)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert [type(part) for part in shared.modules()] == [type(part) for part in alone.modules()]
    assert not shared.backbone._forward_hooks
    assert not shared.backbone._forward_pre_hooks
    assert_same_weights(shared, alone)
    tracked = [name for name, _ in alone.named_buffers() if name.endswith("num_batches_tracked")]
    assert {int(shared.get_buffer(name)) for name in tracked} == {len(losses)}


class OwnStep(Base):
    """Has a step that torch's wrapper never hears of."""

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, torch.Tensor]:
        total, terms = self.objective(batch)
        descend(total, optimizers["main"])
        return terms


def test_an_algorithm_whose_own_step_does_not_evaluate_its_objective_is_refused(team: Team) -> None:
    with pytest.raises(ConfigError, match=r"OwnStep cannot be trained by several processes: its own step does not"):
        trained(OwnStep, uneven(), team)
