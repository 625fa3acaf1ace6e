"""Preparing over a Ray cluster gives the very bytes of this machine, whatever the source."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manydg import jobs, sources
from manydg.errors import ConfigError, DataError

ray = pytest.importorskip("ray", reason="the Ray engine needs ray: pip install 'manydg[ray]'")
pytestmark = pytest.mark.slow
SOURCES = ("sleep-edf", "edf", "mimic3", "eicu", "meds")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    nodes.add_node(**small)
    nodes.wait_for_nodes()
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()


def synthesize(source: str, raw: Path) -> dict[str, Any]:
    small: dict[str, dict[str, Any]] = {
        "sleep-edf": {"patients": 2, "hours": 0.3},
        "edf": {"patients": 3, "minutes": 2},
        "mimic3": {"patients": 80},
        "eicu": {"patients": 40},
        "meds": {"patients": 60},
    }
    sources.synthesize(source, raw, seed=1, **small[source])
    needs = {"mimic3": {"ndc_map": raw / "ndc_to_atc.csv"}, "meds": {"labels": raw / "labels" / "readmission.parquet"}}
    return dict(needs.get(source, {}))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes; the random key of pseudonyms, and the checksum it is part of, are every folder's own."""
    key = rb'"pseudonym_key": "[^"]*"|"checksum": "[^"]{16}"'
    return {path.name: re.sub(key, b"", path.read_bytes()) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("source", SOURCES)
def test_the_dataset_is_the_same_as_one_made_here(
    source: str, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = synthesize(source, tmp_path / "raw")
    here = sources.prepare(source, tmp_path / "raw", tmp_path / "here", **options)
    done: list[str] = []
    result = jobs._result
    monkeypatch.setattr(jobs, "_result", lambda ray, reference: done.append("one") or result(ray, reference))
    monkeypatch.chdir(tmp_path)
    with jobs.using(jobs.engine_named("ray", cluster)):
        there = sources.prepare(source, Path("raw"), Path("there"), **options)
    assert not ray.is_initialized()
    assert len(done) >= 2
    assert contents(there) == contents(here)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "raw", "there"]


def test_a_damaged_file_is_reported_from_the_cluster_as_it_is_here(cluster: str, tmp_path: Path) -> None:
    sources.synthesize("sleep-edf", tmp_path / "raw", patients=2, hours=0.3)
    psg = next((tmp_path / "raw").glob("*-PSG.edf"))
    psg.write_bytes(psg.read_bytes()[:-1000])
    with jobs.using(jobs.engine_named("ray", cluster)), pytest.raises(DataError, match=f"{psg.name} is truncated"):
        sources.prepare("sleep-edf", tmp_path / "raw", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_node_with_another_program_or_without_the_files_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.edf"
    job = jobs.Job("one", (file,), 1)
    with pytest.raises(ConfigError, match=r"does not see .*a\.edf"):
        jobs.do_on_node(str, job, jobs.program_version())
    file.touch()
    with pytest.raises(ConfigError, match="another version"):
        jobs.do_on_node(str, job, "other")
    assert jobs.do_on_node(str, job, jobs.program_version()) == "1"


def test_the_command_starts_a_cluster_of_its_own_and_leaves_none(commands: Any, tmp_path: Path) -> None:
    sources.synthesize("eicu", tmp_path / "raw", patients=30)
    prepare = ["prepare", "eicu", tmp_path / "raw", "--out"]
    code, _, err = commands.run(*prepare, tmp_path / "here")
    assert code == 0, err
    code, out, err = commands.run(*prepare, tmp_path / "there", "--engine", "ray", "--workers", 2)
    assert code == 0, err
    assert "38 samples of 30 synthetic patients" in out
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    code, _, err = commands.run(*prepare, tmp_path / "new", "--address", "auto")
    assert (code, err) == (2, "manydg: --address is for a cluster: add --engine ray\n")
    code, _, err = commands.run(*prepare, tmp_path / "new", "--engine", "rya")
    assert code == 2
    assert "did you mean 'ray'" in err
    assert not os.path.lexists(tmp_path / "new")
