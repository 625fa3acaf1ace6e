"""Dataset folders: whole or not there at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, arrays_of, from_arrays, open_dataset
from manydg.data.info import DatasetInfo, Provenance, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import DataError, StorageError
from manydg.files import disk_error, with_checksum, write_atomically


def example(rows: int = 6, first: float = 0.0) -> DomainDataset:
    codes = [[[row, row + 1], []] if row % 2 else [] for row in range(rows)]
    inputs = {"x": np.arange(first, first + rows * 2.0).reshape(rows, 2), "codes": Ragged.from_rows(codes)}
    patients = [f"patient {row % 3}" for row in range(rows)]
    options = {"times": np.arange(rows), "names": ("no", "yes"), "info": {"settings": {"rate": 5.0}}}
    return from_arrays(inputs, np.arange(rows) % 2, patients, **options)  # type: ignore[arg-type]


def same(left: DomainDataset, right: DomainDataset) -> bool:
    mine, theirs = arrays_of(left), arrays_of(right)
    return (
        list(mine) == list(theirs)
        and all(np.array_equal(mine[key], theirs[key]) for key in mine)
        and (left.target, left.info) == (right.target, right.info)
    )


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_dataset_opens_the_same(tmp_path: Path) -> None:
    opened = open_dataset(example().save(tmp_path / "data"))
    assert same(example(), opened)
    assert opened.stored_hash == example().content_hash()
    assert leftovers(tmp_path) == ["data"]


def test_a_selection_is_saved_as_what_it_shows(tmp_path: Path) -> None:
    view = example().select(torch.tensor([5, 1, 0]))
    opened = open_dataset(view.save(tmp_path / "data"))
    assert same(view.compact(), opened)
    assert opened.rows is None
    again = open_dataset(opened.select(np.array([1])).save(tmp_path / "again"))
    assert again.column("x").tolist() == [[2, 3]]
    assert again.patients.tolist() == ["patient 1"]


def test_a_buffer_may_be_used_again_once_its_rows_are_appended(tmp_path: Path) -> None:
    buffer = np.zeros((1_000, 200), np.float32)
    with DatasetWriter(tmp_path / "data", TargetSpec("binary", ("0", "1"))) as writer:
        for value in range(4):
            buffer[:] = value
            writer.append({"x": buffer}, np.arange(1_000) % 2, [f"patient {value}"] * 1_000)
    opened = open_dataset(tmp_path / "data", verify="full")
    assert np.unique(np.asarray(opened.column("x")).reshape(4, -1), axis=1).tolist() == [[0], [1], [2], [3]]


def test_a_file_so_large_that_memory_lets_go_of_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manydg.data.storage.LARGE_FILE", 100_000)
    monkeypatch.setattr("manydg.data.storage._CACHE_STEP", 10_000)
    whole = np.arange(400_000, dtype=np.float32).reshape(-1, 40)
    with DatasetWriter(tmp_path / "data", TargetSpec("binary", ("0", "1"))) as writer:
        for start in range(0, len(whole), 100):
            part = whole[start : start + 100]
            writer.append_immutable({"x": part}, np.arange(100) % 2, [f"patient {start}"] * 100)
    opened = open_dataset(tmp_path / "data", verify="full")
    assert np.array_equal(np.asarray(opened.column("x")), whole)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_pieces_make_the_same_data_as_the_whole(pieces: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = example(sum(pieces))
    folder = tmp_path_factory.mktemp("pieces") / "data"
    with DatasetWriter(folder, whole.target, whole.info) as writer:
        start = 0
        for size in pieces:
            part = whole.select(np.arange(start, start + size)).compact()
            writer.append(part.columns, part.targets, part.patients[part.domains.numpy()], part.times)
            start += size
    opened = open_dataset(folder)
    assert [opened.patients[code] for code in opened.domains] == [whole.patients[code] for code in whole.domains]
    for name in ("x", "codes"):
        mine, theirs = opened.column(name), whole.column(name)
        rows = mine.to_rows() if isinstance(mine, Ragged) else mine.tolist()
        assert rows == (theirs.to_rows() if isinstance(theirs, Ragged) else theirs.tolist())


def test_rows_that_are_all_empty_can_be_stored(tmp_path: Path) -> None:
    inputs = {"codes": Ragged.from_rows([[], [], []])}
    opened = open_dataset(from_arrays(inputs, [0, 1, 0], [1, 2, 3]).save(tmp_path / "data"))
    column = opened.take(torch.tensor([2, 0])).inputs["codes"]
    assert isinstance(column, Ragged)
    assert column.to_rows() == [[], []]


def test_an_opened_dataset_is_mapped_and_never_written_through(tmp_path: Path) -> None:
    folder = example().save(tmp_path / "data")
    opened = open_dataset(folder)
    opened.columns["x"][0, 0] = 99.0  # type: ignore[index]
    assert open_dataset(folder, verify="full").column("x")[0, 0] == 0.0  # type: ignore[index]


def test_an_existing_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    example().save(tmp_path / "data")
    with pytest.raises(StorageError, match="already exists"):
        example(first=5.0).save(tmp_path / "data")
    assert same(example(), open_dataset(tmp_path / "data"))
    example(first=5.0).save(tmp_path / "data", overwrite=True)
    assert same(example(first=5.0), open_dataset(tmp_path / "data"))
    assert leftovers(tmp_path) == ["data"]


def test_a_folder_that_is_no_dataset_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(StorageError, match="not a dataset folder, so it is not overwritten"):
        example().save(tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    example().save(tmp_path / "empty", overwrite=True)
    assert same(example(), open_dataset(tmp_path / "empty"))


def test_an_error_while_writing_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    example().save(tmp_path / "data")
    for place in ("data", "new"):
        with (  # noqa: PT012
            pytest.raises(RuntimeError, match="interrupted"),
            DatasetWriter(tmp_path / place, example().target, overwrite=True) as writer,
        ):
            writer.append({"x": np.zeros((2, 2))}, np.array([0, 1]), ["a", "b"])
            raise RuntimeError("interrupted")
    assert leftovers(tmp_path) == ["data"]
    assert same(example(), open_dataset(tmp_path / "data"))


KILLED = """
import sys, time
import numpy as np
from manydg.data.info import TargetSpec
from manydg.data.storage import DatasetWriter
with DatasetWriter(sys.argv[1], TargetSpec("binary", ("0", "1")), overwrite=True) as writer:
    for piece in range(1_000_000):
        writer.append({"x": np.full((1000, 50), piece, np.float32)}, np.zeros(1000, np.int64), np.arange(1000))
        if piece == 20:
            print("writing", flush=True)
"""


@pytest.mark.parametrize("old", [False, True])
def test_a_writer_killed_in_the_middle_leaves_no_folder_that_opens_and_the_old_one_survives(
    tmp_path: Path, old: bool
) -> None:
    folder = tmp_path / "data"
    if old:
        example().save(folder)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    remains = [path for path in tmp_path.iterdir() if path.name.startswith(".data.partial-")]
    assert len(remains) == 1
    with pytest.raises(StorageError):
        open_dataset(remains[0])
    if old:
        assert same(example(), open_dataset(folder))
    else:
        with pytest.raises(StorageError, match="no dataset folder"):
            open_dataset(folder)
    example(first=3.0).save(folder, overwrite=True)
    assert same(example(first=3.0), open_dataset(folder))
    assert leftovers(tmp_path) == ["data"]


def _process_that_has_ended() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("moment", ["between the renames", "before the old one is deleted"])
def test_a_kill_while_folders_are_swapped_loses_neither(tmp_path: Path, moment: str) -> None:
    owner = _process_that_has_ended()
    old, new = tmp_path / f".data.old-{owner}", tmp_path / f".data.partial-{owner}"
    if moment == "between the renames":
        example().save(old)
        example(first=3.0).save(new)
        assert same(example(), open_dataset(tmp_path / "data"))
    else:
        example(first=3.0).save(tmp_path / "data")
        example().save(old)
        assert same(example(first=3.0), open_dataset(tmp_path / "data"))
    example(first=7.0).save(tmp_path / "data", overwrite=True)
    assert leftovers(tmp_path) == ["data"]


def test_what_a_living_process_writes_beside_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f".data.partial-{os.getppid()}").mkdir()
    example().save(tmp_path / "data")
    assert leftovers(tmp_path) == [f".data.partial-{os.getppid()}", "data"]


LIMITED = """
import resource, sys
import numpy as np
from manydg.data.dataset import from_arrays
from manydg.files import disk_error, write_atomically
from manydg.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
big = from_arrays(np.zeros((100_000, 4)), np.arange(100_000) % 2, np.arange(100_000) % 7)
try:
    big.save(sys.argv[1], overwrite=True)
except StorageError as error:
    print(error)
"""


def test_a_file_that_cannot_grow_is_an_error_that_keeps_the_old_folder(tmp_path: Path) -> None:
    example().save(tmp_path / "data")
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "data")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stderr == ""
    assert run.stdout.startswith(f"cannot write {tmp_path / 'data'}: File too large")
    assert leftovers(tmp_path) == ["data"]
    assert same(example(), open_dataset(tmp_path / "data"))


needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")


@needs_full_device
def test_a_full_disk_is_an_error_that_keeps_the_old_folder(tmp_path: Path) -> None:
    example().save(tmp_path / "data")
    with (  # noqa: PT012
        pytest.raises(StorageError, match=r"the disk is full while writing .*data: free some space"),
        DatasetWriter(tmp_path / "data", TargetSpec("binary", ("0", "1")), overwrite=True) as writer,
    ):
        (writer._partial / "inputs.x.npy").symlink_to("/dev/full")
        for _ in range(100):
            writer.append({"x": np.zeros((1000, 10))}, np.zeros(1000, np.int64), np.arange(1000))
    assert leftovers(tmp_path) == ["data"]
    assert same(example(), open_dataset(tmp_path / "data"))


@needs_full_device
def test_a_full_disk_keeps_the_old_text_file(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    write_atomically(path, "old")
    (tmp_path / f".split.json.partial-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="the disk is full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert leftovers(tmp_path) == ["split.json"]


def test_a_quota_reads_as_a_full_disk_and_other_errors_as_themselves() -> None:
    assert "the disk is full" in str(disk_error(OSError(errno.EDQUOT, "quota"), Path("x")))
    assert str(disk_error(OSError(errno.EACCES, "Permission denied"), Path("x"))) == "cannot write x: Permission denied"


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        example().save(tmp_path / "file" / "data")
    with pytest.raises(StorageError, match="cannot write"):
        write_atomically(tmp_path / "file" / "split.json", "text")


@pytest.mark.parametrize(
    "name", ["inputs.x", "inputs.codes", "inputs.codes.offsets2", "targets", "domains", "patients"]
)
def test_any_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    folder = example().save(tmp_path / "data")
    path = folder / f"{name}.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(StorageError, match=f"{name}.npy does not match its checksum"):
        open_dataset(folder)


@pytest.mark.parametrize("place", [0, 8, 20, 60])
def test_a_changed_header_is_found(tmp_path: Path, place: int) -> None:
    folder = example().save(tmp_path / "data")
    content = bytearray((folder / "targets.npy").read_bytes())
    content[place] ^= 1
    (folder / "targets.npy").write_bytes(bytes(content))
    with pytest.raises(StorageError, match=r"targets\.npy does not begin as dataset\.json says"):
        open_dataset(folder)


def test_a_missing_or_shortened_file_is_found_even_without_reading_all(tmp_path: Path) -> None:
    folder = example().save(tmp_path / "data")
    path = folder / "inputs.x.npy"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StorageError, match="bytes instead of"):
        open_dataset(folder, verify="sizes")
    path.unlink()
    with pytest.raises(StorageError, match=r"inputs.x.npy is missing"):
        open_dataset(folder, verify="sizes")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", {}),
        ("files", None),
        ("target", {"kind": "classes", "names": ["other", "names"]}),
        ("target", {}),
        ("columns", {"y": 0}),
        ("content_hash", "0" * 16),
        ("pseudonym_key", "not hex"),
        ("info", []),
        ("info", None),
    ],
)
def test_a_changed_description_is_found(tmp_path: Path, key: str, value: object) -> None:
    folder = example().save(tmp_path / "data")
    description = json.loads((folder / "dataset.json").read_text())
    description[key] = value
    (folder / "dataset.json").write_text(json.dumps(description))
    with pytest.raises(StorageError, match=r"dataset\.json is damaged"):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda about: about["info"]["settings"]["features"].__setitem__(0, "other"), "does not match its checksum"),
        (lambda about: about["info"].update(test_patients=["1"]), "does not match its checksum"),
        (lambda about: about["info"]["provenance"].pop("synthetic"), "does not match its checksum"),
        (lambda about: about.update(pseudonym_key="00"), "does not match its checksum"),
        (lambda about: about.update(samples=1), "does not match its checksum"),
        (lambda about: about["integrity"].update(checksum="0" * 16), "does not match its checksum"),
        (lambda about: about.pop("integrity"), "an earlier version wrote it: it has no checksum"),
    ],
)
def test_what_training_depends_on_is_covered_by_a_checksum(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    origin = Provenance("table", synthetic=True)
    info = DatasetInfo(settings={"features": ["a", "b"], "steps": {2: "x", 10: "y"}}, provenance=origin)
    folder = replace(example(), info=info).save(tmp_path / "data")
    open_dataset(folder)
    description = json.loads((folder / "dataset.json").read_text())
    change(description)
    (folder / "dataset.json").write_text(json.dumps(description))
    with pytest.raises(StorageError) as error:
        open_dataset(folder)
    assert str(error.value).startswith(f"{folder / 'dataset.json'} was changed after it was written")
    assert reason in str(error.value)
    assert str(error.value).endswith("prepare the dataset again")


@pytest.mark.parametrize("changed", [
    {"columns": ["x"]}, {"columns": {"x": 1}}, {"columns": {"x": 10**9}}, {"columns": {"x": -1}},
    {"columns": {"x": "0"}}, {"samples": [4]}, {"patients": None},
])  # fmt: skip
def test_a_forged_description_is_damaged_even_where_its_checksum_is_right(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    folder = from_arrays(np.zeros((4, 2)), [0, 1, 0, 1], [1, 1, 2, 2]).save(tmp_path / "data")
    description = json.loads((folder / "dataset.json").read_text())
    assert description["columns"] == {"x": 0}
    description.pop("integrity")
    (folder / "dataset.json").write_text(json.dumps(with_checksum({**description, **changed})))
    with pytest.raises(StorageError, match=r"dataset\.json is damaged: prepare the dataset again"):
        open_dataset(folder)


def test_a_sample_of_no_patient_is_found_without_checksums(tmp_path: Path) -> None:
    folder = example().save(tmp_path / "data")
    content = bytearray((folder / "domains.npy").read_bytes())
    content[-1] ^= 0x40
    (folder / "domains.npy").write_bytes(content)
    with pytest.raises(StorageError, match=r"domains\.npy is damaged, it names patients there are not"):
        open_dataset(folder, verify="sizes")


def test_a_folder_without_description_or_of_another_version_does_not_open(tmp_path: Path) -> None:
    folder = example().save(tmp_path / "data")
    text = (folder / "dataset.json").read_text()
    (folder / "dataset.json").write_text(text[: len(text) // 2])
    with pytest.raises(StorageError, match="damaged"):
        open_dataset(folder)
    (folder / "dataset.json").write_text(text.replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.raises(StorageError, match="schema version 99"):
        open_dataset(folder)
    (folder / "dataset.json").unlink()
    with pytest.raises(StorageError, match=r"has no dataset\.json"):
        open_dataset(folder)


def test_pieces_that_do_not_fit_are_refused_before_anything_is_there(tmp_path: Path) -> None:
    good = {"x": np.zeros((2, 3), np.float32)}
    labels, who = np.array([0, 1]), ["a", "b"]
    wrong = [
        ({"x": np.zeros((3, 3))}, labels, who, None, "input 'x': 3 rows, but there are 2 patient ids"),
        ({"x": np.zeros((2, 4))}, labels, who, None, r"rows of shape \(4,\) after rows of \(3,\)"),
        ({"y": np.zeros((2, 3))}, labels, who, None, r"inputs \['y'\] does not fit"),
        (good, np.array([0]), who, None, "targets: 1 rows"),
        (good, labels, who, np.zeros(2), "does not fit"),
        (good, np.array([0.5, 0.5]), who, None, "values of type float64 after values of int64"),
        ({"x": np.array([["a"] * 3] * 2)}, labels, who, None, "inputs are numbers"),
        (good, labels, ["a", None], None, "patient ids are missing"),
    ]
    for inputs, targets, patients, times, message in wrong:
        with (  # noqa: PT012
            pytest.raises(DataError, match=message),
            DatasetWriter(tmp_path / "data", TargetSpec("binary", ("0", "1"))) as writer,
        ):
            writer.append(good, labels, who)
            writer.append(inputs, targets, patients, times)
    with (
        pytest.raises(DataError, match="not a single sample"),
        DatasetWriter(tmp_path / "data", TargetSpec("binary", ("0", "1"))),
    ):
        pass
    assert leftovers(tmp_path) == []


def test_the_writer_stores_measurements_as_float32_and_codes_as_int64(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", TargetSpec("binary", ("0", "1"))) as writer:
        inputs = {"x": np.zeros((2, 3)), "flag": np.array([True, False]), "code": np.array([1, 2], np.int16)}
        writer.append(inputs, np.array([0, 1]), np.array([7.0, 8.0]))
    opened = open_dataset(tmp_path / "data")
    assert [opened.columns[name].dtype for name in inputs] == [torch.float32, torch.int64, torch.int64]  # type: ignore[union-attr]
    assert opened.patients.tolist() == ["7", "8"]
