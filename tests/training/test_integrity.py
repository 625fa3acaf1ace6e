"""What a decision depends on is covered by checksums, and where these are right by checks of its values."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manydg import ManyDGClassifier, open_run, train
from manydg.algorithms import ALGORITHMS
from manydg.backbones import build_backbone
from manydg.cli import main
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.errors import ManyDGError, StorageError
from manydg.files import file_checksum, with_checksum
from manydg.predict import predict_raw
from manydg.targets import target_of
from manydg.training.inference import rebuild
from manydg.training.record import COVERED, RunRecord, read_tensors, write_tensors

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def dataset(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset_of("binary").save(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="module")
def trained(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train(dataset_of("binary"), epochs=1, seed=seed, context="offline", out=folder / str(seed), device="cpu")
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained / "0", tmp_path / "run")


def _edit(file: Path, change: Change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _reseal(folder: Path) -> None:
    """New checksums for whatever the folder holds, as whoever forges one would make them."""
    content = json.loads((folder / "run.json").read_text())
    content.pop("integrity")
    files = {name: file_checksum(folder / name) for name in COVERED if (folder / name).exists()}
    (folder / "run.json").write_text(json.dumps(with_checksum(content, files)))


def _forge(folder: Path, file: str, change: Change) -> None:
    if file == "run.json":
        _edit(folder / file, change)
    else:
        tensors, meta = read_tensors(folder / file)
        content: dict[str, Any] = json.loads(json.dumps(meta))
        change(content)
        write_tensors(folder / file, tensors, content)
    _reseal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("threshold", 0.01),
        ("threshold", None),
        ("threshold_rule", "best"),
        ("target", {"kind": "binary", "names": ["yes", "no"]}),
        ("test", {"auroc": 1.0}),
        ("dataset", "other"),
        ("integrity", {}),
        ("integrity", None),
        ("integrity", {"files": {}, "checksum": "0"}),
    ],
)
def test_a_changed_record_is_refused(run: Path, dataset: Path, tmp_path: Path, key: str, value: object) -> None:
    _edit(run / "run.json", lambda record: record.update({key: value}))
    for opening in (
        lambda: open_run(run),
        lambda: predict_raw(run, dataset, tmp_path / "new"),
        lambda: RunRecord.read(run / "run.json"),
    ):
        with pytest.raises(StorageError, match=r"run\.json was changed after it was written"):
            opening()


@pytest.mark.parametrize("file", ["run.json", "model.safetensors", "calibration.safetensors", "predictions.npz"])
def test_a_file_of_another_run_is_refused(run: Path, trained: Path, file: str) -> None:
    shutil.copy(trained / "1" / file, run / file)
    with pytest.raises(StorageError, match="does not match its checksum"):
        open_run(run)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("model.safetensors", rb"\"lr\": 0", rb"\"lr\": 1"),
        ("calibration.safetensors", rb"\"level\": 0", rb"\"level\": 1"),
    ],
)
def test_a_changed_description_inside_a_file_is_refused(run: Path, file: str, old: bytes, new: bytes) -> None:
    content = (run / file).read_bytes()
    assert old in content
    (run / file).write_bytes(content.replace(old, new))
    with pytest.raises(StorageError, match=f"{file} is damaged"):
        open_run(run)
    with pytest.raises(StorageError, match="its content does not match its checksum"):
        read_tensors(run / file)


def test_a_calibration_that_is_gone_or_new_is_refused(run: Path) -> None:
    kept = (run / "calibration.safetensors").read_bytes()
    (run / "calibration.safetensors").unlink()
    with pytest.raises(StorageError, match=r"calibration\.safetensors is missing"):
        open_run(run)
    _reseal(run)
    open_run(run)
    (run / "calibration.safetensors").write_bytes(kept)
    with pytest.raises(StorageError, match=r"calibration\.safetensors is not of this run"):
        open_run(run)


def test_predictions_and_split_may_be_deleted(run: Path, dataset: Path, tmp_path: Path) -> None:
    (run / "predictions.npz").unlink()
    (run / "split.json").unlink()
    predict_raw(run, dataset, tmp_path / "new")


def _deep(value: dict[str, Any], *path: str) -> dict[str, Any]:
    for name in path:
        value = value[name]
    return value


def _sets(*path: str, value: object) -> Change:
    return lambda content: _deep(content, *path[:-1]).update({path[-1]: value})


def _drops(*path: str) -> Change:
    return lambda content: _deep(content, *path[:-1]).pop(path[-1], None)


ABSURD: list[object] = [
    7, -1, -0.5, 1e308, 10**30, "text", "", None, True, [], {}, [[]], ["a", 3], {"a": {"b": []}},
    float("nan"), float("inf"),
]  # fmt: skip
PLACES = [
    *(("run.json", (name,)) for name in (
        "threshold", "threshold_rule", "target", "samples", "patients", "config", "epoch", "seed", "algorithm", "test",
        "val", "per_patient", "history", "run", "dataset", "synthetic", "status", "context", "curve", "experiments",
        "variant", "schema",
    )),
    ("run.json", ("target", "names")),
    ("run.json", ("target", "kind")),
    ("run.json", ("config", "settings")),
    *(("model.safetensors", (name,)) for name in ("config", "schema", "target", "n_domains", "info")),
    *(("model.safetensors", ("config", name)) for name in (
        "algorithm", "settings", "backbone", "backbone_options", "epochs", "lr", "seed", "ratios", "selection",
        "context", "context_options", "precision",
    )),
    *(("model.safetensors", ("schema", name)) for name in ("columns", "sizes", "settings")),
    *(("model.safetensors", ("schema", "columns", "x", name)) for name in ("dtype", "shape", "nesting")),
    ("model.safetensors", ("schema", "settings", "context")),
    *(("model.safetensors", ("schema", "settings", "context", name)) for name in (
        "mode", "parts", "scales", "strength", "gap",
    )),
    *(("model.safetensors", ("target", name)) for name in ("kind", "names")),
    *(("model.safetensors", ("info", name)) for name in ("source", "settings", "vocabularies", "roles", "module")),
    *(("calibration.safetensors", (name,)) for name in (
        "temperature", "on_average", "for_most", "limit", "false_alarms", "patients",
    )),
    *(("calibration.safetensors", ("on_average", name)) for name in ("level", "share")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "path"), PLACES, ids=lambda value: value if isinstance(value, str) else ".".join(value)
)
def test_a_forged_folder_brings_out_no_foreign_error(
    trained: Path, dataset: Path, tmp_path: Path, file: str, path: tuple[str, ...]
) -> None:
    for number, change in enumerate([*(_sets(*path, value=value) for value in ABSURD), _drops(*path)]):
        folder = shutil.copytree(trained / "0", tmp_path / str(number))
        _forge(folder, file, change)
        for use in (
            lambda folder=folder, number=number: predict_raw(folder, dataset, tmp_path / f"new-{number}"),
            lambda folder=folder: ManyDGClassifier.load(folder),
        ):
            with contextlib.suppress(ManyDGError):
                use()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("run.json", _sets("threshold", value=7), "threshold is 7"),
        ("calibration.safetensors", _sets("temperature", value=-1.0), "the temperature is -1.0"),
        ("model.safetensors", _sets("n_domains", value=-1), "it is of -1 patients"),
        ("model.safetensors", _sets("target", "names", value=["a", "b", "c"]), "a binary target has two class names"),
        ("model.safetensors", _sets("target", "names", value=["a", "b"]), "its classes are not those of run.json"),
        ("model.safetensors", _sets("config", "epochs", value="many"), "epochs is 'many'"),
        ("model.safetensors", _sets("schema", "columns", "x", "shape", value=[2**40]), "impossible shape"),
        ("model.safetensors", _sets("schema", "columns", "x", "shape", value=[2**27]), "is of another shape"),
        ("model.safetensors", _sets("config", "backbone_options", value={"width": 10**9}), "is of another shape"),
        ("model.safetensors", _sets("config", "backbone_options", value={"layers": 10**12}), "more layers than it has"),
        ("model.safetensors", _sets("config", "backbone_options", value={"layers": 300}), "more layers than it has"),
    ],
)
def test_a_forged_value_is_named(
    run: Path, dataset: Path, tmp_path: Path, file: str, change: Change, message: str
) -> None:
    _forge(run, file, change)
    with pytest.raises(StorageError) as error:
        predict_raw(run, dataset, tmp_path / "new")
    assert message in str(error.value)
    assert not (tmp_path / "new").exists()


def test_tensors_that_no_file_holds_are_bounded_before_memory_is_taken(
    dataset_of: Callable[..., DomainDataset],
) -> None:
    data = dataset_of("binary")
    schema, target, config = InputSchema.of(data), target_of(data.target), TrainingConfig("groupdro")
    small = ALGORITHMS.get("groupdro")(build_backbone("mlp", schema), target, data.n_patients)
    rebuild(config, schema, target, data.n_patients, small.state_dict(), source=Path("model.safetensors"))
    with pytest.raises(StorageError, match="would take far more memory than its weights"):
        rebuild(config, schema, target, 2**30, small.state_dict(), source=Path("model.safetensors"))


class Panic(BaseException):
    """As a library written in Rust raises it."""


@pytest.mark.parametrize("kind", [LookupError, Panic])
def test_an_unforeseen_error_is_one_line_and_a_private_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: type[BaseException]
) -> None:
    def broken(**_: object) -> None:
        raise kind("patient 4711 is not there")

    monkeypatch.setattr("manydg.cli.app", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    (file,) = tmp_path.iterdir()
    assert (
        line == f"manydg: {kind.__name__}: this is a fault of the program; its traceback is in {file}, please report it"
    )
    assert "patient 4711 is not there" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
