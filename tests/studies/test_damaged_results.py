"""Damaged files of a results folder are refused by name, in one line of a length that can be read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manydg.data.dataset import DomainDataset
from manydg.data.storage import read_description as read_dataset
from manydg.errors import ManyDGWarning, StorageError
from manydg.evaluation.metrics import read_predictions
from manydg.report.results_folder import read_results_folder
from manydg.studies.conduct import compare
from manydg.studies.records import read_description, read_results, read_runs
from manydg.studies.summary import load_predictions, summarize_folder
from manydg.targets import target_of
from manydg.training.record import RunRecord


@pytest.fixture(scope="module")
def results(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    data = dataset_of().save(folder / "data")
    compare(data, ["base"], 1, folder / "results", device="cpu")
    return folder / "results"


def damaged(path: Path, change: Callable[[Any], None]) -> bytes:
    before = path.read_bytes()
    content = json.loads(before)
    change(content)
    path.write_text(json.dumps(content))
    return before


@pytest.mark.parametrize("value", ["x", float("inf"), [[]]])
def test_a_count_that_is_none_is_refused(results: Path, value: object) -> None:
    path = results / "study.json"

    def change(study: Any) -> None:
        for entry in (*study["datasets"].values(), study["dataset"]):
            entry["samples"] = value
            entry["samples_per_patient"]["0.5"] = value

    before = damaged(path, change)
    with pytest.raises(StorageError, match=r"study\.json is damaged"):
        read_description(results)
    path.write_bytes(before)


def test_a_use_without_its_experiment_is_refused(results: Path) -> None:
    [run] = (results / "runs").iterdir()
    use = run / "use-0123456789abcdef.json"
    for content in ('{"variant": {}}', '{"experiment": "x", "variant": 3}'):
        use.write_text(content)
        with pytest.raises(StorageError, match=r"use-0123456789abcdef\.json is damaged"):
            read_runs(results)
    use.unlink()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("results.jsonl", lambda record: record["test"].update(kappa=1.0)),
        ("results.jsonl", lambda record: record.update(seed=5)),
        ("results.jsonl", lambda record: record.update(experiments=[])),
        ("results.jsonl", lambda record: record.pop("integrity")),
        ("study.json", lambda study: study["datasets"]["data"].update(patients=5)),
        ("study.json", lambda study: study.pop("integrity")),
    ],
)
def test_changed_results_are_refused(results: Path, file: str, change: Any) -> None:
    before = damaged(results / file, change)
    with pytest.raises(StorageError, match=rf"{file}.* was changed after it was written"):
        read_results_folder(results)
    (results / file).write_bytes(before)
    read_results_folder(results)


def test_a_report_says_which_runs_have_lost_their_line(results: Path) -> None:
    path = results / "results.jsonl"
    before = path.read_bytes()
    other = RunRecord.from_line(before, "line").replace(run="0123456789abcdef", folder="runs/0123456789abcdef")
    path.write_text(other.to_line() + "\n")
    with pytest.warns(ManyDGWarning, match=r"results\.jsonl lacks 1 of the finished runs"):
        read_results_folder(results)
    path.write_bytes(before)


def test_a_run_that_lost_its_predictions_is_named_with_the_remedy_by_study_and_report(results: Path) -> None:
    [record] = read_results(results)
    path = results / record.folder / "predictions.npz"
    path.rename(path.with_name("aside"))
    with pytest.warns(ManyDGWarning, match=rf"1 of 1 runs have lost predictions\.npz.*delete .*{record.run} and"):
        summarize_folder(results)
    with pytest.warns(ManyDGWarning, match=rf"{record.run} has lost its predictions\.npz"):
        read_results_folder(results)
    path.with_name("aside").rename(path)
    summarize_folder(results)


def test_a_changed_use_is_refused(results: Path) -> None:
    [use] = results.glob("runs/*/use-*.json")
    before = damaged(use, lambda content: content.update(experiment="other"))
    with pytest.raises(StorageError, match=r"use-\w+\.json is damaged, its content does not match its name"):
        read_runs(results)
    use.write_bytes(before)


def test_predictions_of_another_run_are_refused_and_those_without_a_record_not_used(results: Path) -> None:
    [record] = read_results(results)
    path = results / record.folder / "predictions.npz"
    before = path.read_bytes()
    assert load_predictions(results, record) is not None
    with np.load(path) as arrays:
        np.savez(path, **{name: array[::-1] if name == "probabilities" else array for name, array in arrays.items()})
    with pytest.raises(StorageError, match=r"predictions\.npz is damaged or was changed"):
        load_predictions(results, record)
    path.write_bytes(before)
    path.with_name("run.json").rename(path.with_name("aside"))
    assert load_predictions(results, record) is None
    with pytest.warns(ManyDGWarning, match=r"1 of the runs in .* have lost their run\.json"):
        read_results_folder(results)
    path.with_name("aside").rename(path.with_name("run.json"))


def test_results_that_are_no_text_are_refused_with_the_line(results: Path) -> None:
    path = results / "results.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"run": "\xff"}\n')
    with pytest.raises(StorageError, match="line 2 is damaged"):
        read_results(results)
    path.write_bytes(before)


def test_infinite_counts_in_records_and_datasets_are_refused(results: Path) -> None:
    [run] = (results / "runs").iterdir()
    before = damaged(run / "run.json", lambda record: record["samples"].update(test=float("inf")))
    with pytest.raises(StorageError):
        RunRecord.read(run / "run.json")
    (run / "run.json").write_bytes(before)
    data = results.parent / "data"
    before = damaged(
        data / "dataset.json", lambda about: next(iter(about["files"].values())).update(bytes=float("inf"))
    )
    with pytest.raises(StorageError):
        read_dataset(data)
    (data / "dataset.json").write_bytes(before)


def test_predictions_with_any_changed_byte_are_read_or_refused_by_name(results: Path) -> None:
    [run] = (results / "runs").iterdir()
    target, path = target_of(RunRecord.read(run / "run.json").target), run / "predictions.npz"
    before = path.read_bytes()
    refused = 0
    for position in range(0, len(before), 3):
        path.write_bytes(before[:position] + bytes([before[position] ^ 255]) + before[position + 1 :])
        try:
            read_predictions(path, "test", target)
        except StorageError as error:
            refused += "predictions.npz" in str(error)
    path.write_bytes(before)
    assert refused > 100


def test_predictions_that_unpack_to_gigabytes_are_refused_unread(results: Path, tmp_path: Path) -> None:
    [record] = read_results(results)
    target, bomb = target_of(record.target), tmp_path / "predictions.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("split.npy", "w") as file:
        for _ in range(300):
            file.write(bytes(1 << 20))
    with pytest.raises(
        StorageError, match=r"predictions\.npz cannot be read \(it unpacks to 300 MB, more than the 256"
    ):
        read_predictions(bomb, "test", target)


def test_a_message_with_a_column_name_of_thousands_of_bytes_can_be_read(commands: Any, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(b"\0" * 5000 + b",stage,f0\n1,2,3\n")
    command = "prepare table table.csv --patient patient --target stage --features f0 --out out"
    code, _, err = commands.run(*command.split(), folder=tmp_path)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("manydg: table.csv")
    assert len(err) < 1000
