"""Provenance: files, options and counts end up in the dataset, without folder names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from manydg.data.info import CohortStep, DatasetInfo, SourceFile
from manydg.errors import StorageError
from manydg.sources._preparing import CohortFlow, Progress, describe_files, with_provenance


def test_a_files_checksum_is_the_one_that_physionet_lists(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000
    (tmp_path / "a.bin").write_bytes(content)
    (entry,) = describe_files([tmp_path / "a.bin"])
    assert entry == SourceFile("a.bin", len(content), hashlib.sha256(content).hexdigest())


def test_a_missing_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gone\.edf"):
        describe_files([tmp_path / "gone.edf"])


def test_provenance_is_json_and_names_no_folder(tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text("x")
    flow = CohortFlow()
    flow.add("found", patients=2)
    options = {"ndc_map": tmp_path / "map.csv", "limit": None}
    info = with_provenance(DatasetInfo(), "mimic3", [tmp_path / "map.csv"], options, flow, raw=tmp_path)
    text = json.dumps(info.to_json())
    assert str(tmp_path) not in text
    assert info.provenance.options == {"ndc_map": "map.csv", "limit": None}
    assert info.cohort_flow == (CohortStep("found", {"patients": 2}),)


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", total=3) as progress:
        progress.advance()
        progress.describe("still reading")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ""
