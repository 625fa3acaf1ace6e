"""What commands write only its owner can read, and it does not say where on the machine it was made."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manydg import train
from manydg.cli import main
from manydg.data.dataset import DomainDataset
from manydg.predict import predict_raw
from manydg.training.export import export_run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes of files are POSIX")


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def _modes(folder: Path) -> set[str]:
    return {
        f"{path.relative_to(folder)} {path.stat().st_mode & 0o777:o}"
        for path in (folder, *folder.rglob("*"))
        if path.stat().st_mode & 0o077
    }


def test_datasets_runs_and_predictions_are_their_owners_alone(
    dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    data = dataset_of()
    folder = data.save(tmp_path / "data")
    train(data, epochs=1, out=tmp_path / "runs" / "run", device="cpu")
    predict_raw(tmp_path / "runs" / "run", folder, tmp_path / "new")
    for made in ("data", "runs", "new"):
        assert _modes(tmp_path / made) == set()


def test_results_are_their_owners_alone_and_name_no_folder_above(
    dataset_of: Callable[..., DomainDataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = dataset_of().save(tmp_path / "user-ann" / "data"), tmp_path / "user-ann" / "results"
    for arguments in (
        ["compare", folder, "--out", out, "--seeds", 1, "--epochs", 1, "--algorithms", "base"],
        ["report", out, "--out", out / "report.html"],
    ):
        monkeypatch.setattr(sys, "argv", ["manydg", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
    assert _modes(out) == set()
    command = json.loads((out / "study.json").read_text())["commands"]["compare"]
    assert command == "manydg compare data --out results --seeds 1 --epochs 1 --algorithms base"
    for file in out.rglob("*"):
        assert file.is_dir() or b"user-ann" not in file.read_bytes(), file


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_an_exported_model_names_no_folder(
    dataset_of: Callable[..., DomainDataset], tmp_path: Path, format: str
) -> None:
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    run = train(dataset_of(), epochs=1, backbone=None, device="cpu")
    content = export_run(run, tmp_path / "model", format).path.read_bytes()
    for name in (str(Path(sys.prefix)).encode(), str(Path(__file__).parents[2]).encode(), b"site-packages"):
        assert name not in content
