"""Background threads of the file writer: in order, bounded, and with their errors raised where results are used."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg import files
from manydg.files import HashingThread, prefetch_map


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
