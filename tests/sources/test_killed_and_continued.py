"""A ``manydg prepare`` that is killed goes on from its finished pieces and ends with the very same bytes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest

from manydg import sources
from manydg.data.storage import read_description
from manydg.errors import StorageError
from manydg.sources import _stays, _visits, edf, meds

# Dies by SIGKILL when it begins its n-th piece of work.
PROGRAM = """
import importlib, json, os, signal, sys
module, function, source, raw, out, options, die_at = json.loads(sys.argv[1])
place, begun = importlib.import_module(module), []
real = getattr(place, function)
def dying(task):
    begun.append(task)
    if len(begun) == die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(task)
setattr(place, function, dying)
from manydg import sources
sources.prepare(source, raw, out, **options)
"""
WORK: dict[str, tuple[ModuleType, str, int]] = {
    "mimic3": (_visits, "keep_table", 3),
    "meds": (meds, "_read_file", 3),
    "eicu": (_stays, "read_table", 5),
    "mimic4": (_stays, "read_table", 6),
    "edf": (edf, "survey", 4),
}


def synthesize(source: str, raw: Path) -> dict[str, Any]:
    """Raw files in several pieces; returns the options that prepare needs."""
    if source == "mimic3":
        sources.synthesize("mimic3", raw, patients=80, seed=1)
        return {"ndc_map": str(raw / "ndc_to_atc.csv")}
    if source == "meds":
        sources.synthesize("meds", raw, patients=60, seed=1)
        rows = pl.read_parquet(raw / "data" / "0.parquet")
        for shard, (_, part) in enumerate(rows.group_by(pl.col("subject_id") % 3, maintain_order=True)):
            part.write_parquet(raw / "data" / f"{shard}.parquet")
        return {"labels": str(raw / "labels" / "readmission.parquet")}
    if source == "edf":
        sources.synthesize("edf", raw, patients=2, seed=1, minutes=2)
        return {}
    sources.synthesize(source, raw, patients=40, seed=1)
    return {"task": "readmission"} if source == "mimic4" else {}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes; the random key of pseudonyms, and the checksum it is part of, are every folder's own."""
    key = rb'"pseudonym_key": "[^"]*"|"checksum": "[^"]{16}"'
    return {path.name: re.sub(key, b"", path.read_bytes()) for path in sorted(folder.iterdir())}


def killed(source: str, folder: Path, options: dict[str, Any]) -> None:
    """Prepare ``folder/out`` in a process that dies when it begins its last piece."""
    place, function, pieces = WORK[source]
    told = [
        place.__name__,
        function,
        source,
        str(folder / "raw"),
        str(folder / "out"),
        options,
        pieces,
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(told)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    assert not (folder / "out").exists()


@pytest.mark.parametrize("source", WORK)
def test_a_killed_prepare_reuses_its_finished_pieces_and_ends_with_the_same_bytes(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = synthesize(source, tmp_path / "raw")
    place, function, pieces = WORK[source]
    begun: list[Any] = []
    real = getattr(place, function)
    monkeypatch.setattr(place, function, lambda task: begun.append(task) or real(task))
    whole = sources.prepare(source, tmp_path / "raw", tmp_path / "whole", **options)
    assert len(begun) == pieces
    killed(source, tmp_path, options)
    begun.clear()
    out = sources.prepare(source, tmp_path / "raw", tmp_path / "out", **options)
    assert len(begun) == 1, "all but the piece in which it was killed should have been taken over"
    assert contents(out) == contents(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw", "whole"]


@pytest.mark.parametrize("source", ["mimic3", "meds"])
def test_a_command_killed_at_any_of_its_writes_can_be_run_again(source: str, commands: Any, tmp_path: Path) -> None:
    options = synthesize(source, tmp_path / "raw")
    arguments = ["prepare", source, tmp_path / "raw"]
    arguments += [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)]
    code, _, err = commands.run(*arguments, "--out", tmp_path / "whole")
    assert code == 0, err
    for number in range(1, 20):
        code, _, err = commands.run(*arguments, "--out", tmp_path / "out", die_at=number)
        if code == 0:
            break
        assert code == -9, err
        assert not (tmp_path / "out").exists()
    assert code == 0
    assert 3 < number < 20
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_pieces_left_beside_a_complete_dataset_are_cleared_but_not_those_of_a_replacement(tmp_path: Path) -> None:
    raw, out, work = tmp_path / "raw", tmp_path / "out", tmp_path / ".out.work"
    work.mkdir()
    (work / "piece.json").touch()
    sources.synthesize("sleep-edf", raw, patients=1, hours=0.25, nights=1)
    sources.prepare("sleep-edf", raw, out)
    for newer, stays in ((-10, False), (10, True)):
        work.mkdir(exist_ok=True)
        (work / "piece.json").touch()
        moment = out.stat().st_mtime + newer
        os.utime(work / "piece.json", (moment, moment))
        with pytest.raises(StorageError, match="already exists"):
            sources.prepare("sleep-edf", raw, out)
        assert work.exists() == stays


def test_pieces_of_other_options_are_not_taken_over(tmp_path: Path) -> None:
    options = synthesize("mimic3", tmp_path / "raw")
    killed("mimic3", tmp_path, options)
    few = sources.prepare("mimic3", tmp_path / "raw", tmp_path / "out", max_diagnoses=5, **options)
    fresh = sources.prepare("mimic3", tmp_path / "raw", tmp_path / "fresh", max_diagnoses=5, **options)
    assert contents(few) == contents(fresh)
    assert len(read_description(few).info.vocabularies["diagnoses"]) <= 6
