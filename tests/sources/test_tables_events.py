"""Events gathered in any order and laid out; look-ups from ids and texts."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.data.columns import Ragged, check_column
from manydg.sources import _events
from manydg.sources._events import EventStore, Field, PackedRows, Vocabulary, join_blocks
from manydg.sources._tables import CategoryMap, SampleIndex

FIELDS = [Field("a", 0), Field("b", 0), Field("c", 1)]
ROW = st.tuples(
    st.integers(0, 5),
    st.integers(-40, 40) | st.sampled_from([-(10**10), 10**10]),
    st.sampled_from("abc"),
    st.sampled_from(["x", "y", "z"]),
    st.sampled_from([None, 1.0, -2.5, 0.0]),
)


def fill(rows: list[tuple[int, int, str, str, float | None]], pieces: int = 1) -> EventStore:
    store = EventStore(FIELDS, 6)
    for piece in np.array_split(np.arange(len(rows)), pieces):
        for name in "abc":
            chosen = [rows[at] for at in piece if rows[at][2] == name]
            store.add(
                name,
                np.array([row[0] for row in chosen], np.int64),
                np.array([row[1] for row in chosen], np.int64),
                store.word_ids(name, pl.Series([row[3] for row in chosen], dtype=pl.String)),
                np.array([np.nan if row[4] is None else row[4] for row in chosen], np.float32),
            )
    return store


@settings(max_examples=120, deadline=None)
@given(
    st.lists(ROW, max_size=40), st.integers(1, 3), st.integers(1, 3), st.none() | st.integers(3, 6), st.integers(1, 9)
)
def test_the_layout_is_what_a_plain_loop_gives(
    rows: list[tuple[int, int, str, str, float | None]], pieces: int, least: int, most: int | None, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_events, "BLOCK", block)
        store = fill(rows, pieces)
        vocabulary = store.vocabulary()
        samples, columns = join_blocks(store.blocks(vocabulary, min_events=least, max_events=most))
    kind_of = {field.name: field.kind for field in FIELDS}
    found: dict[int, dict[tuple[int, int], set[tuple[int, float]]]] = defaultdict(lambda: defaultdict(set))
    for sample, time, name, word, value in rows:
        code = vocabulary.words.index(f"{name}:{word}")
        found[sample][time, kind_of[name]].add((code, np.inf if value is None else value))
    expected = {
        sample: sorted((key, sorted(codes)) for key, codes in events.items())[-most if most else None :]
        for sample, events in sorted(found.items())
        if len(events) >= least
    }
    assert samples.tolist() == list(expected)
    kinds, times, codes, values = (columns[f"event_{name}"] for name in ("kind", "time", "codes", "values"))
    for name, column in columns.items():
        check_column(name, column)
    for at, events in enumerate(expected.values()):
        row = [column.to_rows()[at] for column in (kinds, times, codes, values) if isinstance(column, Ragged)]
        got = [
            ((np.float32(t), k), [(c, np.inf if np.isnan(v) else v) for c, v in zip(cs, vs, strict=True)])
            for k, t, cs, vs in zip(*row, strict=True)  # type: ignore[call-overload]
        ]
        assert got == [((np.float32(time), kind), codes) for (time, kind), codes in events]


def test_words_outside_a_given_vocabulary_are_unknown_but_keep_their_kind() -> None:
    store = fill([(0, 1, "a", "x", None), (0, 1, "c", "new", 3.0)])
    _, columns = join_blocks(store.blocks(Vocabulary(["<unknown>", "a:x"], [])))
    assert columns["event_codes"].to_rows()[0] == [[1], [0]]  # type: ignore[union-attr]
    assert columns["event_kind"].to_rows()[0] == [0, 1]  # type: ignore[union-attr]


def test_times_too_far_apart_for_one_key_are_numbered_instead() -> None:
    time = np.array([-(2**61), 0, 2**61])
    zero, code = np.zeros(3, np.int64), np.full(3, 2**18)
    rows = PackedRows.pack(zero, time, zero, code, np.zeros(3, np.float32)).arranged()
    assert rows.sample_time_kind(rows.event)[1].tolist() == time.tolist()
    assert rows.code.tolist() == code.tolist()


@pytest.mark.parametrize("shift", [0, 1 << 40])
def test_ids_are_found_and_strange_ones_are_not(shift: int) -> None:
    ids = np.array([30, 10, 20]) + shift
    index = SampleIndex(ids)
    assert index(ids[[2, 0, 1, 1]]).tolist() == [2, 0, 1, 1]
    assert index(np.array([-1, -2, -9, 0, 11, 31, 32, 1 << 50, -(1 << 50)])).tolist() == [-1] * 9


def test_each_category_is_converted_once() -> None:
    seen: list[str] = []

    def convert(words: pl.Series) -> np.ndarray:
        seen.extend(words)
        return words.str.len_chars().to_numpy()

    lengths = CategoryMap(convert, np.int64)
    kind = pl.Categorical(pl.Categories.random())
    assert lengths(pl.Series(["aa", "b", "aa"]).cast(kind)).tolist() == [2, 1, 2]
    assert lengths(pl.Series(["ccc", "b"]).cast(kind)).tolist() == [3, 1]
    assert lengths(pl.Series([], dtype=pl.String).cast(kind)).tolist() == []
    assert sorted(seen) == ["aa", "b", "ccc"]


def test_a_numbering_is_kept_though_its_first_column_was_empty() -> None:
    lengths = CategoryMap(lambda words: words.str.len_chars().to_numpy(), np.int64)
    kind = pl.Categorical(pl.Categories.random())
    assert lengths(pl.Series([], dtype=pl.String).cast(kind)).tolist() == []
    assert [lengths(pl.Series([word]).cast(kind)).item() for word in ("a", "bb", "ccc", "a")] == [1, 2, 3, 1]
