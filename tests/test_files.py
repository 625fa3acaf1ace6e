"""Writing files: atomic, with clear errors; and the background threads, in order and bounded."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg import files
from manydg.errors import StorageError
from manydg.files import (
    HashingThread,
    append_line,
    claimed,
    is_running,
    new_folder,
    partial_name,
    prefetch_map,
    read_json,
    remove_partial_files,
    replacing,
    write_atomically,
    write_json,
    write_unsynced,
)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 1, 100, 70_000, 200_000])), max_size=20))
def test_checksums_of_pieces_in_any_sizes_are_those_of_the_whole(sizes: list[tuple[int, int]]) -> None:
    digests, whole = [hashlib.blake2b(), hashlib.sha256()], [b"", b""]
    with closing(HashingThread()) as hashing:
        for number, (which, size) in enumerate(sizes):
            piece = bytes([number]) * size
            hashing.update(digests[which], memoryview(piece))
            whole[which] += piece
        hashing.wait()
    assert digests[0].digest() == hashlib.blake2b(whole[0]).digest()
    assert digests[1].digest() == hashlib.sha256(whole[1]).digest()


class Slow:
    """A checksum that waits to be let go on, and knows how many bytes it has seen."""

    def __init__(self) -> None:
        self.gate, self.seen = threading.Semaphore(0), 0

    def update(self, data: memoryview) -> None:
        self.gate.acquire()
        self.seen += len(data)


def test_no_more_than_the_limit_waits_to_be_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_PENDING_BYTES", 300_000)
    slow, piece = Slow(), memoryview(bytes(100_000))
    with closing(HashingThread()) as hashing:
        for _ in range(3):
            hashing.update(slow, piece)
        fourth = threading.Thread(target=hashing.update, args=(slow, piece))
        fourth.start()
        fourth.join(0.05)
        assert fourth.is_alive()
        slow.gate.release()
        fourth.join(10)
        assert not fourth.is_alive()
        assert slow.seen == 100_000
        slow.gate.release(3)
        hashing.wait()
    assert slow.seen == 400_000


def test_a_piece_larger_than_the_limit_is_hashed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_PENDING_BYTES", 10)
    digest = hashlib.sha256()
    with closing(HashingThread()) as hashing:
        for _ in range(2):
            hashing.update(digest, memoryview(bytes(100_000)))
        hashing.wait()
    assert digest.digest() == hashlib.sha256(bytes(200_000)).digest()


def test_what_is_prefetch_map_comes_in_order_and_only_a_little_ahead() -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(30):
            taken.append(number)
            yield number

    def square(number: int) -> int:
        time.sleep(0.002 if number % 3 == 0 else 0)
        return number * number

    seen = []
    for found in prefetch_map(square, numbers(), threads=2):
        assert len(taken) <= len(seen) + 3
        seen.append(found)
    assert seen == [number * number for number in range(30)]


def test_what_fails_ahead_fails_where_it_is_taken() -> None:
    results = prefetch_map(lambda number: 1 // number, [2, 1, 0, 3])
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def _write_and_fail(path: Path, error: Exception) -> None:
    path.write_bytes(b"half")
    raise error


def test_a_failed_write_leaves_the_old_file_and_no_partial_one(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_atomically(file, "old")
    with pytest.raises(ZeroDivisionError), replacing(file) as partial:
        _write_and_fail(partial, ZeroDivisionError())
    assert file.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_text_bytes_and_unsynced_text_are_written_as_they_are(tmp_path: Path) -> None:
    write_atomically(tmp_path / "deep" / "a", "zwölf\n")
    write_atomically(tmp_path / "b", b"\x00\n")
    write_unsynced(tmp_path / "c", "{}")
    append_line(tmp_path / "c", "[]")
    contents = [(tmp_path / name).read_bytes() for name in ("deep/a", "b", "c")]
    assert contents == ["zwölf\n".encode(), b"\x00\n", b"{}[]" + os.linesep.encode()]


@pytest.mark.parametrize("text", ["{", "[1]", "null", "\udcff"])
def test_a_file_that_holds_no_json_object_is_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StorageError, match=r"a\.json is damaged: make it again"):
        read_json(tmp_path / "a.json", remedy="make it again")


def test_a_missing_or_unreadable_json_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"b\.json is missing: make it again"):
        read_json(tmp_path / "b.json", remedy="make it again")
    with pytest.raises(StorageError, match="there is none"):
        read_json(tmp_path / "b.json", remedy="", missing="there is none")
    with pytest.raises(StorageError, match="cannot read"):
        read_json(tmp_path, remedy="make it again")


def test_json_comes_back_as_it_was_written(tmp_path: Path) -> None:
    content = {"a": [1, 2.5, None, True], "b": {"c": "ü"}}
    write_json(tmp_path / "a.json", content)
    assert read_json(tmp_path / "a.json", remedy="") == content
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"a": float("nan")}, allow_nan=False)


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "whole") as folder:
        (folder / "a").write_bytes(b"1")
        assert not (tmp_path / "whole").exists()
    with pytest.raises(StorageError, match="the disk is full"), new_folder(tmp_path / "half") as folder:
        _write_and_fail(folder / "a", OSError(errno.ENOSPC, "full"))
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_partial_files_of_killed_processes_go_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    mine, theirs = (tmp_path / f".a.partial-{number}" for number in (os.getpid(), ended.pid))
    for path in (mine, theirs):
        path.write_bytes(b"")
    remove_partial_files(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]
    assert is_running(os.getpid())
    # A search that is killed while it writes tuning.json: the next command on its folder clears it.
    out = tmp_path / "out"
    out.mkdir()
    (out / theirs.name).write_bytes(b"")
    with claimed(out):
        assert list(out.iterdir()) == []


@pytest.mark.parametrize("folder", ["", ".", "/"])
def test_a_folder_without_a_name_of_its_own_is_refused(folder: str) -> None:
    with pytest.raises(StorageError, match="cannot be written anew: name a file or folder in it"):
        partial_name(Path(folder))
