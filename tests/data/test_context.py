"""Patient context against plain loops, and that nothing can leak into it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.data.columns import Ragged
from manydg.data.context import add_context, fitting_parts, with_session_gap
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.timeline import DEFAULT_PARTS, PARTS, REMEMBERED
from manydg.errors import ConfigError, DataError

MODES = ("offline", "causal")


def make(seed: int = 0, patients: int = 5, most: int = 40, missing: float = 0.2, width: int = 3) -> DomainDataset:
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(patients), rng.integers(1, most, patients))
    times = np.concatenate([np.sort(rng.choice(500, (who == p).sum(), replace=False)) for p in range(patients)])
    values = rng.normal(size=(len(who), width)) * 3 + who[:, None] * 10
    values[rng.random(values.shape) < missing] = np.nan
    shuffled = rng.permutation(len(who))
    labels = rng.integers(0, 3, len(who))
    labels[:3] = [0, 1, 2]
    return from_arrays(
        values[shuffled],
        labels,
        who[shuffled],
        times=times[shuffled],
        kind="classes",
        names=("a", "b", "c"),
        missing=True,
    )


def context(data: DomainDataset, mode: str, **options: object) -> np.ndarray:
    column = add_context(data, mode, **{"parts": PARTS[mode], **options}).columns["context"]
    assert isinstance(column, torch.Tensor)
    return column.numpy()


def weights(data: DomainDataset, mode: str) -> list[float]:
    """The weight of each sample's context, with the default strength of 5."""
    column = add_context(data, mode).columns["context_weight"]
    assert isinstance(column, torch.Tensor)
    return column[:, 0].tolist()


def changed(data: DomainDataset, rows: np.ndarray, by: float = 1e6) -> DomainDataset:
    values = data.columns["x"].clone()  # type: ignore[union-attr]
    values[rows] = values[rows] * -3 + by
    return dataclasses.replace(data, columns={"x": values})


def relative_by_loop(data: DomainDataset, mode: str, strength: float) -> np.ndarray:
    """The relative part, one sample at a time."""
    values, who, times = data.columns["x"].numpy().astype(float), data.domains.numpy(), data.times.numpy()  # type: ignore[union-attr]
    found = np.zeros_like(values)
    for row, column in np.ndindex(values.shape):
        mine = who == who[row]
        if mode == "causal":
            mine &= (times < times[row]) | (np.arange(len(who)) == row)
        seen = values[mine, column]
        seen = seen[~np.isnan(seen)]
        if np.isnan(values[row, column]) or len(seen) < 2:
            continue
        others = len(seen) - 1
        found[row, column] = others / (others + strength) * (values[row, column] - seen.mean()) / seen.std()
    return found.clip(-10, 10)


@pytest.mark.parametrize("mode", MODES)
def test_the_relative_part_is_distance_from_the_patients_own_mean_in_own_deviations(mode: str) -> None:
    data = make()
    found = context(data, mode, parts=("relative",), strength=5.0)
    np.testing.assert_allclose(found, relative_by_loop(data, mode, 5.0), atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_neighbours_are_means_of_the_nearest_samples_strictly_before_and_after(mode: str) -> None:
    data = make(1, missing=0.0, width=1)
    sides = ("before",) if mode == "causal" else ("before", "after")
    found = context(data, mode, parts=sides, scales=(2, 4))
    values, who, times = data.columns["x"].numpy()[:, 0], data.domains.numpy(), data.times.numpy()  # type: ignore[union-attr]
    for row in range(len(values)):
        mine = np.flatnonzero(who == who[row])
        mine = mine[np.argsort(times[mine])]
        at = int(np.flatnonzero(mine == row)[0])
        wanted = [mine[max(0, at - 2) : at], mine[max(0, at - 4) : at]]
        wanted += [mine[at + 1 : at + 3], mine[at + 1 : at + 5]] if mode == "offline" else []
        means = [values[rows].mean() - values[row] if len(rows) else 0.0 for rows in wanted]
        np.testing.assert_allclose(found[row], means, atol=1e-4)


def test_extremes_and_ages_are_those_of_the_values_so_far() -> None:
    values = np.array([[3.0], [1.0], [1.0], [np.nan], [5.0], [5.0]])
    data = from_arrays(values, [0, 1, 0, 1, 0, 1], ["p"] * 6, times=np.array([0, 1, 3, 4, 6, 10]), missing=True)
    found = context(data, "causal", parts=("extremes", "age"))
    np.testing.assert_allclose(found[:, 0], [0, 0, 0, 0, 4, 4], atol=1e-6)
    np.testing.assert_allclose(found[:, 1], [0, -2, -2, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(np.expm1(found[:, 2]), [0, 0, 2, 0, 0, 4], atol=1e-5)


def test_the_age_of_a_value_is_counted_within_the_session() -> None:
    data = from_arrays(np.full((4, 1), 7.0), [0, 1, 0, 1], ["p"] * 4, times=np.array([0, 3, 100, 104]))
    ages = np.expm1(context(data, "causal", parts=("age",), gap=50.0)[:, 0])
    assert ages.tolist() == pytest.approx([0, 3, 0, 4], abs=1e-4)
    assert np.expm1(context(data, "causal", parts=("age",))[:, 0]).tolist() == pytest.approx([0, 3, 100, 104], rel=1e-4)


def test_no_neighbours_are_taken_over_a_long_gap() -> None:
    data = from_arrays(np.array([[1.0], [2.0], [9.0]]), [0, 1, 0], ["p"] * 3, times=np.array([0, 1, 100]))
    with_gap = context(data, "offline", parts=("before",), scales=(1,), gap=10.0)[:, 0]
    assert with_gap.tolist() == [0.0, -1.0, 0.0]
    assert context(data, "offline", parts=("before",), scales=(1,))[:, 0].tolist() == [0.0, -1.0, -7.0]


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(MODES))
def test_labels_never_enter(seed: int, mode: str) -> None:
    data = make(seed)
    other = dataclasses.replace(data, targets=data.targets.flip(0))
    assert np.array_equal(context(data, mode), context(other, mode))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(MODES), st.sampled_from((1e6, 1e30)))
def test_other_patients_never_enter_to_the_last_bit(seed: int, mode: str, by: float) -> None:
    data = make(seed)
    others = (data.domains != 2).numpy()
    after = context(changed(data, np.flatnonzero(others), by), mode)
    assert np.array_equal(context(data, mode)[~others], after[~others])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 500))
def test_causal_context_never_looks_ahead_to_the_last_bit(seed: int, now: int) -> None:
    data = make(seed)
    late = (data.times > now).numpy()  # type: ignore[operator]
    after = context(changed(data, np.flatnonzero(late), 1e30), "causal")
    assert np.array_equal(context(data, "causal")[~late], after[~late])


def test_causal_context_is_the_same_when_later_samples_are_not_there_yet() -> None:
    data = make(3)
    early = data.select(data.times <= 200)  # type: ignore[operator, arg-type]
    rows = np.flatnonzero((data.times <= 200).numpy())  # type: ignore[operator]
    np.testing.assert_array_equal(context(data, "causal")[rows], context(early, "causal"))


def test_samples_of_one_time_do_not_see_each_other() -> None:
    data = from_arrays(np.array([[1.0], [2.0], [50.0]]), [0, 1, 0], ["p"] * 3, times=np.array([0, 1, 1]))
    alone = from_arrays(np.array([[1.0], [2.0]]), [0, 1], ["p"] * 2, times=np.array([0, 1]))
    np.testing.assert_array_equal(context(data, "causal")[:2], context(alone, "causal"))
    # Nor does the second of the two, in the order of rows, see the first.
    other = from_arrays(np.array([[1.0], [50.0]]), [0, 1], ["p"] * 2, times=np.array([0, 1]))
    np.testing.assert_array_equal(context(data, "causal")[[0, 2]], context(other, "causal"))
    assert weights(data, "causal") == pytest.approx([0, 1 / 6, 1 / 6])


def test_a_new_patient_begins_a_new_timeline_at_whatever_time() -> None:
    """The second patient's first sample has the time of the first patient's last: nothing is known of him yet."""
    values, times = np.array([[1.0], [2.0], [30.0], [40.0]]), np.array([0, 1, 1, 2])
    both = from_arrays(values, [0, 1, 0, 1], ["a", "a", "b", "b"], times=times)
    assert weights(both, "causal") == pytest.approx([0, 1 / 6, 0, 1 / 6])
    for rows in ([0, 1], [2, 3]):
        alone = from_arrays(values[rows], [0, 1], ["p", "p"], times=times[rows])
        for mode in MODES:
            np.testing.assert_array_equal(context(both, mode, gap=5.0)[rows], context(alone, mode, gap=5.0))


def test_a_pause_as_long_as_the_gap_does_not_end_a_session() -> None:
    data = from_arrays(np.array([[1.0], [2.0], [4.0]]), [0, 1, 0], ["p"] * 3, times=np.array([0, 10, 20.5]))
    assert context(data, "causal", parts=("before",), scales=(1,), gap=10.0)[:, 0].tolist() == [0.0, -1.0, 0.0]


def test_the_gap_is_the_dataset_s_where_none_is_given() -> None:
    data = from_arrays(np.array([[1.0], [2.0]]), [0, 1], ["p"] * 2, times=np.array([0, 100]))
    assert context(data, "causal", parts=("before",), scales=(1,))[:, 0].tolist() == [0.0, -1.0]
    apart = dataclasses.replace(data, info=dataclasses.replace(data.info, settings={"session_gap": 50.0}))
    assert context(apart, "causal", parts=("before",), scales=(1,))[:, 0].tolist() == [0.0, 0.0]


def test_deviations_beyond_ten_of_the_patient_s_own_are_cut() -> None:
    """One of 401 values differs: it is twenty deviations from the mean, of which a weight of 400/405 is left."""
    values = np.zeros((401, 1))
    values[-1] = 1e6
    data = from_arrays(values, np.arange(401) % 2, ["p"] * 401, times=np.arange(401))
    relative = context(data, "offline", parts=("relative",), strength=5.0)[:, 0]
    assert relative[-1] == 10.0
    level = context(data.select(np.arange(401)[::-1].copy()), "offline", parts=("after-level",), scales=(1,))[:, 0]
    assert level.max() == 10.0


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_the_rows_does_not_matter(mode: str) -> None:
    data = make(4)
    order = np.random.default_rng(0).permutation(len(data))
    np.testing.assert_allclose(context(data, mode)[order], context(data.select(order), mode), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", [0, 1, 5, 50])
def test_trust_in_the_usual_grows_with_the_samples_of_the_patient(mode: str, others: int) -> None:
    rng = np.random.default_rng(others)
    values = np.r_[rng.normal(size=others), 4.0][:, None]
    number = np.arange(others + 1)
    data = from_arrays(values, number % 2, ["p"] * (others + 1), times=number, kind="binary", names=("n", "y"))
    found = context(data, mode, parts=("relative",), strength=5.0)[-1]
    weight = others / (others + 5.0)
    deviation = values.std() if others else 1.0
    assert found[0] == pytest.approx(weight * (4.0 - values.mean()) / deviation, abs=1e-5)


def test_a_patient_with_one_sample_has_a_context_of_zeros() -> None:
    data = from_arrays(np.array([[1.0], [2.0]]), [0, 1], ["p", "q"], times=np.array([5, 9]))
    for mode in MODES:
        assert not context(data, mode).any()


def test_missing_values_leave_no_nan_in_the_context() -> None:
    data = make(5, missing=0.9)
    for mode in MODES:
        assert np.isfinite(context(data, mode)).all()


def test_values_that_never_change_are_not_blown_up() -> None:
    data = from_arrays(np.full((50, 1), 0.1), [0, 1] * 25, ["p"] * 50, times=np.arange(50))
    assert not context(data, "offline", parts=("relative",)).any()


@pytest.mark.parametrize("mode", MODES)
def test_a_view_has_the_context_of_its_own_rows(mode: str) -> None:
    data = make(6)
    view = data.select(np.flatnonzero((data.domains >= 2).numpy()))
    np.testing.assert_array_equal(context(view, mode), context(data, mode)[(data.domains >= 2).numpy()])


def test_without_times_only_the_relative_part_can_be_made() -> None:
    data = dataclasses.replace(make(7), times=None)
    assert add_context(data).columns["context"].shape == (len(data), 3)  # type: ignore[union-attr]
    with pytest.raises(DataError, match="causal context needs the time"):
        add_context(data, "causal")
    with pytest.raises(DataError, match="before"):
        add_context(data, parts=("before",))


def test_the_last_measured_value_its_age_trend_and_count_are_remembered() -> None:
    nan = np.nan
    x = np.array([[nan], [5.0], [nan], [9.0], [nan], [nan], [2.0]], dtype=np.float32)
    times = np.array([0.0, 1.0, 2.0, 3.0, 5.0, 100.0, 101.0])
    data = from_arrays(x, [0, 1, 0, 1, 0, 1, 0], ["p"] * 7, times=times, missing=True)
    last, since, trend, count = context(data, "causal", parts=("last", "since", "trend", "count"), gap=50.0).T
    assert last.tolist() == [0, 0, 5, 5, 9, 0, 0], "carried within a session"
    np.testing.assert_allclose(np.expm1(since), [0, 1, 1, 2, 2, 0, 1], atol=1e-6)
    assert trend.tolist() == [0, 0, 0, 2, 2, 0, 0]
    np.testing.assert_allclose(np.expm1(count), [0, 0, 1, 1, 2, 0, 0], rtol=1e-6)


def test_where_most_is_missing_causal_context_remembers_what_was_measured() -> None:
    sparse, dense = make(missing=0.8), make(missing=0.2)
    assert set(REMEMBERED) <= set(fitting_parts(sparse, "causal"))
    assert fitting_parts(dense, "causal") == DEFAULT_PARTS["causal"]
    assert fitting_parts(sparse, "offline") == DEFAULT_PARTS["offline"]


def records(seed: int = 0, patients: int = 6, stays: int = 4) -> DomainDataset:
    """Stays of events, each of one to three codes, and two features of the patient."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(patients), stays)
    events = [[rng.integers(1, 50, rng.integers(1, 4)).tolist() for _ in range(rng.integers(1, 8))] for _ in who]
    static = torch.from_numpy(rng.normal(size=(len(who), 2)).astype(np.float32))
    times = np.tile(np.arange(float(stays)), patients)
    columns = {"event_codes": Ragged.from_rows(events), "static": static}
    return from_arrays(columns, rng.integers(0, 2, len(who)), who, times=times, kind="binary")


def with_other_stay(data: DomainDataset, row: int) -> DomainDataset:
    """The same with one stay replaced by others' codes and features."""
    codes, static = data.columns["event_codes"], data.columns["static"]
    assert isinstance(codes, Ragged)
    assert isinstance(static, torch.Tensor)
    rows = codes.to_rows()
    rows[row] = [[49], [48, 47]]
    moved = static.clone()
    moved[row] += 5.0
    columns = {"event_codes": Ragged.from_rows(rows), "static": moved}
    return dataclasses.replace(data, columns=columns, stored_hash=None)


def test_of_records_only_earlier_visits_are_context() -> None:
    data = records()
    with pytest.raises(DataError, match="only earlier ones can be context"):
        add_context(data)
    before = context(data, "causal")
    after = context(with_other_stay(data, 1), "causal")
    # Patient 0 has the rows 0 to 3, in the order of time.
    differs = (before != after).any(axis=1)
    assert differs.tolist() == [False, False, True, True, *[False] * 20]
    assert (before[::4] == 0).all(), "a first stay has no context"
    assert weights(data, "causal")[:4] == pytest.approx([0, 0.5, 2 / 3, 0.75])


def test_the_context_of_a_stay_is_the_mean_of_the_earlier_ones_and_their_number() -> None:
    data, found = records(), context(records(), "causal")
    codes = data.columns["event_codes"]
    assert isinstance(codes, Ragged)
    counts = [np.log1p(sum(map(len, stay))) for stay in codes.to_rows()]
    assert found[3, -6] == pytest.approx(0.75 * np.mean(counts[:3]), rel=1e-5)
    np.testing.assert_allclose(found[:4, -5], np.log1p([0, 1, 2, 3]), rtol=1e-6)
    assert found[:4, -4:].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]


def test_the_same_codes_have_the_same_summary_whatever_their_order() -> None:
    data = records()
    codes = data.columns["event_codes"]
    assert isinstance(codes, Ragged)
    turned = Ragged.from_rows([[event[::-1] for event in row][::-1] for row in codes.to_rows()])
    again = dataclasses.replace(data, columns={**data.columns, "event_codes": turned}, stored_hash=None)
    np.testing.assert_allclose(context(again, "causal"), context(data, "causal"), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parts": ("relativ",)}, "relative"),
        ({"scales": (3,)}, "powers of two"),
        ({"scales": [1.5]}, "scales of context are a list of whole numbers"),
        ({"scales": 4}, "scales of context are a list of whole numbers"),
        ({"parts": [1]}, "parts of context are a list of names"),
        ({"parts": "relative"}, "parts of context are a list of names"),
        ({"gap": "6h"}, "gap of context is a number"),
        ({"strength": [1.0]}, "strength of context is a number"),
        ({"strength": 0.0}, "positive"),
        ({"sise": 1}, "option of context"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        add_context(make(), "offline", **options)


def test_causal_context_knows_no_after() -> None:
    with pytest.raises(ConfigError, match="after"):
        add_context(make(), "causal", parts=("after",))


def test_context_is_added_once() -> None:
    with pytest.raises(DataError, match="already"):
        add_context(add_context(make()))


def test_sessions_are_as_far_apart_as_in_training_unless_their_distance_was_measured() -> None:
    times = torch.tensor([0.0, 1.0, 5.0, 6.0, 56.0, 0.0, 4.0], dtype=torch.float64)
    info = {"settings": {"session_gap": 2.0}}
    data = from_arrays(torch.zeros(7, 1), [0, 1] * 3 + [0], ["a"] * 5 + ["b"] * 2, times=times, info=info)
    order = torch.tensor([6, 3, 0, 5, 1, 4, 2])
    moved = with_session_gap(data.select(order), 10.0)
    assert moved.times is not None
    expected = torch.tensor([0.0, 1.0, 21.0, 22.0, 72.0, 0.0, 20.0], dtype=torch.float64)
    assert moved.times.tolist() == expected[order].tolist()
    assert moved.info.session_gap == 10.0
    assert with_session_gap(data, 2.0) is data
    assert with_session_gap(data, None) is data
