"""The scikit-learn face: tables with categories, weights, threads, embeddings and splits by patient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
import torch
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from manydg import ManyDGClassifier, PatientSplit
from manydg.errors import ManyDGWarning
from manydg.estimator import _repeats

WHO = np.repeat(np.arange(24), 10)
UNITS = np.array(["ward", "icu", "emergency"])


def table(seed: int = 0) -> tuple[pd.DataFrame, np.ndarray[Any, Any]]:
    """Units of a hospital decide the label; the number beside them says little, a column of dates nothing."""
    rng = np.random.default_rng(seed)
    unit = rng.integers(0, 3, len(WHO))
    y = np.where(rng.random(len(WHO)) < 0.05, rng.integers(0, 2, len(WHO)), unit == 1)
    frame = pd.DataFrame(
        {
            "age": rng.normal(60, 10, len(WHO)),
            "unit": pd.Categorical(UNITS[unit]),
            "sex": np.where(rng.random(len(WHO)) < 0.5, "F", "M"),
            "seen": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 300, len(WHO)), unit="D"),
        }
    )
    frame.loc[::17, "sex"] = None
    return frame, y


def quick(algorithm: str = "manydg", **options: Any) -> ManyDGClassifier:
    return ManyDGClassifier(algorithm, **{"epochs": 6, "lr": 1e-2, "random_state": 0, **options})


@pytest.mark.parametrize("algorithm", ["manydg", "boosting"])
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_columns_of_text_are_categories_in_both_libraries(library: str, algorithm: str) -> None:
    X, y = table()
    new, truth = table(1)
    if library == "polars":
        X, new = pl.from_pandas(X), pl.from_pandas(new)
    model = quick(algorithm).fit(X, y, groups=WHO)
    assert model.feature_names_in_.tolist() == ["age", "unit", "sex", "seen"]
    assert model.n_features_in_ == 4
    assert model.score(new, truth) > 0.9


def test_pandas_and_polars_give_the_same_model() -> None:
    X, y = table()
    one = quick(epochs=2).fit(X, y, groups=WHO).predict_proba(X)
    two = quick(epochs=2).fit(pl.from_pandas(X), y, groups=WHO).predict_proba(pl.from_pandas(X))
    np.testing.assert_array_equal(one, two)


def test_an_unseen_level_and_an_empty_cell_are_predicted_and_other_columns_refused(tmp_path: Path) -> None:
    X, y = table()
    model = quick(epochs=1).fit(X, y, groups=WHO)
    strange = X.astype({"unit": object}).assign(unit="space station", sex=None)
    assert np.isfinite(model.predict_proba(strange)).all()
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(X.rename(columns={"unit": "ward"}))
    with pytest.raises(ValueError, match="fitted on a table with categories: give a pandas or polars frame"):
        model.predict(np.zeros((3, 4)))
    model.save(tmp_path / "model")
    again = ManyDGClassifier.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


def test_a_table_without_rows_has_no_predictions_and_one_with_a_column_twice_is_refused() -> None:
    X, y = table()
    model = quick(epochs=1).fit(X, y, groups=WHO)
    assert model.predict(X[:0]).shape == (0,)
    with pytest.raises(ValueError, match="twice: rename or remove one"):
        quick().fit(pd.concat([X, X], axis=1), y, groups=WHO)


def test_weights_say_how_often_a_sample_is_trained_on() -> None:
    assert _repeats(np.array([2.0, 4.0, 6.0]), 0).tolist() == [1, 2, 3]
    weights = np.random.default_rng(0).uniform(1, 3, 2000)
    repeats = _repeats(weights, 0)
    assert set(repeats) == {1, 2, 3}
    assert abs(repeats.sum() - (weights / weights.min()).sum()) <= 1
    assert abs(repeats[weights > 2].mean() - (weights / weights.min())[weights > 2].mean()) < 0.05
    assert _repeats(np.array([1e-9, 1e9]), 0).tolist() == [1, 20]


def test_a_weight_of_zero_is_a_sample_left_out() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, len(WHO))
    X = rng.normal(size=(len(WHO), 3)) + 2 * y[:, None]
    kept = np.arange(len(WHO)) % 3 != 0
    one = quick(epochs=2).fit(X, y, groups=WHO, sample_weight=kept.astype(float))
    two = quick(epochs=2).fit(X[kept], y[kept], groups=WHO[kept])
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))


@pytest.mark.parametrize("algorithm", ["manydg", "boosting"])
def test_balanced_classes_find_more_of_a_rare_one(algorithm: str) -> None:
    rng = np.random.default_rng(0)
    y = (rng.random(len(WHO)) < 0.1).astype(int)
    X, new = (rng.normal(size=(len(WHO), 3)) + 0.8 * y[:, None] for _ in range(2))
    options: dict[str, Any] = {"validation_share": 0, "epochs": 10}
    options |= {"settings": {"rounds": 50, "leaf_samples": 40}} if algorithm == "boosting" else {}
    plain = quick(algorithm, **options).fit(X, y, groups=WHO)
    balanced = quick(algorithm, class_weight="balanced", **options).fit(X, y, groups=WHO)
    assert balanced.predict_proba(new)[:, 1].mean() > plain.predict_proba(new)[:, 1].mean() + 0.05
    assert (balanced.predict(new)[y == 1] == 1).mean() > (plain.predict(new)[y == 1] == 1).mean()


@pytest.mark.parametrize(
    ("options", "weights", "message"),
    [
        ({}, np.ones(3), "one weight for each sample"),
        ({}, np.full(len(WHO), -1.0), "none of them negative"),
        ({"sequence": "gru"}, np.ones(len(WHO)), "sequence is read as it is"),
        ({"algorithm": "best"}, np.ones(len(WHO)), "sequence is read as it is"),
        ({"n_jobs": 0}, None, "n_jobs is 0; it is a number of threads"),
    ],
)
def test_wrong_weights_and_threads_are_refused(options: dict[str, Any], weights: Any, message: str) -> None:
    X, y = np.zeros((len(WHO), 2)), np.arange(len(WHO)) % 2
    with pytest.raises(ValueError, match=message):
        quick(**options).fit(X, y, groups=WHO, times=np.arange(len(WHO)), sample_weight=weights)


def test_n_jobs_threads_are_used_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from manydg import estimator

    seen: list[int] = []
    real = estimator.fit
    monkeypatch.setattr(estimator, "fit", lambda *a, **k: seen.append(torch.get_num_threads()) or real(*a, **k))
    before = torch.get_num_threads()
    X, y = np.random.default_rng(0).normal(size=(len(WHO), 2)), np.arange(len(WHO)) % 2
    quick(epochs=1, n_jobs=before + 1).fit(X, y, groups=WHO)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_the_warning_without_groups_names_metadata_routing() -> None:
    X, y = np.random.default_rng(0).normal(size=(len(WHO), 2)), np.arange(len(WHO)) % 2
    with pytest.warns(ManyDGWarning, match=r"enable_metadata_routing=True.*set_fit_request\(groups=True\)"):
        quick(epochs=1).fit(X, y)


@pytest.mark.parametrize("options", [{"context": "offline"}, {"sequence": "gru"}])
def test_a_model_that_draws_on_other_samples_warns_without_groups(options: dict[str, Any]) -> None:
    X, y = np.random.default_rng(0).normal(size=(len(WHO), 2)), np.arange(len(WHO)) % 2
    times = np.tile(np.arange(10.0), 24)
    model = quick("base", epochs=1, **options).fit(X, y, groups=WHO, times=times)
    with pytest.warns(ManyDGWarning, match=r"each is predicted as if it were alone.*set_predict_proba_request"):
        model.predict_proba(X)
    model.predict_proba(X, groups=WHO, times=times)


@pytest.mark.parametrize("algorithm", ["manydg", "base", "boosting"])
def test_embeddings_have_names_and_come_as_a_frame_where_that_is_set(algorithm: str) -> None:
    X, y = table()
    model = quick(algorithm, epochs=1).fit(X, y, groups=WHO)
    plain = model.transform(X)
    names = model.get_feature_names_out()
    assert plain.shape == (len(X), len(names))
    frame = model.set_output(transform="pandas").transform(X)
    assert frame.columns.tolist() == names.tolist()
    assert names[0] == "manydgclassifier0"
    np.testing.assert_array_equal(frame.to_numpy(), plain)
    assert isinstance(model.set_output(transform="polars").transform(X), pl.DataFrame)


def test_a_frame_from_the_step_before_keeps_its_names() -> None:
    X = pd.DataFrame(np.random.default_rng(0).normal(size=(len(WHO), 3)), columns=["a", "b", "c"])
    with sklearn.config_context(enable_metadata_routing=True):
        steps = make_pipeline(StandardScaler(), quick(epochs=1).set_fit_request(groups=True))
        steps.set_output(transform="pandas").fit(X, np.arange(len(WHO)) % 2, groups=WHO)
    assert steps[-1].feature_names_in_.tolist() == ["a", "b", "c"]


# PatientSplit


def labels() -> np.ndarray[Any, Any]:
    """One patient in three is ever positive, and then in some samples only."""
    return ((WHO % 3 == 0) & (np.arange(len(WHO)) % 2 == 0)).astype(int)


def test_every_patient_is_tested_once_and_each_fold_has_its_share_of_positive_patients() -> None:
    y = labels()
    tested: list[int] = []
    for train, test in PatientSplit(4).split(y, y, WHO):
        assert not set(WHO[train]) & set(WHO[test])
        assert len(train) + len(test) == len(y)
        tested += sorted(set(WHO[test].tolist()))
        assert sum(y[patient == WHO].any() for patient in set(WHO[test])) == 2
    assert sorted(tested) == list(range(24))
    plain = [y[test].sum() for _, test in PatientSplit(4, stratify=False).split(y, y, WHO)]
    assert len(set(plain)) > 1


def test_folds_depend_on_seed_and_patients_alone() -> None:
    y, shuffled = labels(), np.random.default_rng(0).permutation(len(WHO))
    folds = [set(WHO[test]) for _, test in PatientSplit(4).split(y, y, WHO)]
    assert folds == [set(WHO[shuffled][test]) for _, test in PatientSplit(4).split(y, y[shuffled], WHO[shuffled])]
    assert folds != [set(WHO[test]) for _, test in PatientSplit(4, random_state=1).split(y, y, WHO)]


@pytest.mark.parametrize("dates", [False, True])
def test_with_times_no_training_sample_is_later_than_the_first_tested(dates: bool) -> None:
    # Patients come one after the other, and stay on while others come.
    times: Any = WHO * 3.0 + np.tile(np.arange(10), 24) * 5
    if dates:
        times = np.datetime64("2024-01-01") + times.astype("timedelta64[D]")
    seen = 0
    for train, test in PatientSplit(3).split(WHO, groups=WHO, times=times):
        assert times[train].max() < times[test].min()
        assert not set(WHO[train]) & set(WHO[test])
        assert WHO[test].min() > seen
        seen = WHO[test].max()
        assert len(train)
    assert seen == 23


def test_numbers_are_spread_by_their_quarters() -> None:
    y = WHO + np.random.default_rng(0).random(len(WHO))
    means = [y[test].mean() for _, test in PatientSplit(4).split(y, y, WHO)]
    plain = [y[test].mean() for _, test in PatientSplit(4, stratify=False).split(y, y, WHO)]
    assert np.std(means) < np.std(plain)


def test_searches_and_scores_take_it_with_patients_and_times() -> None:
    y = labels()
    X = np.random.default_rng(0).normal(size=(len(WHO), 2)) + y[:, None]
    with sklearn.config_context(enable_metadata_routing=True):
        model = quick("boosting").set_fit_request(groups=True, times=False)
        search = GridSearchCV(model, {"settings": [{"rounds": 50}, {"rounds": 60}]}, cv=PatientSplit(3))
        search.fit(X, y, groups=WHO)
        assert search.n_splits_ == 3
        forward = PatientSplit(2).set_split_request(times=True)
        scores = cross_val_score(model, X, y, cv=forward, params={"groups": WHO, "times": WHO * 1.0})
    assert len(scores) == 2
    assert np.isfinite(scores).all()


@pytest.mark.parametrize(
    ("folds", "groups", "times", "message"),
    [
        (3, None, None, "needs the patients: give groups"),
        (30, WHO, None, "30 folds need 2 or more, and 30 patients; there are 24"),
        (24, WHO, WHO * 1.0, "and 25 patients; there are 24"),
        (3, WHO, np.where(WHO == 3, np.nan, 1.0), "some times are missing"),
    ],
)
def test_what_cannot_be_split_is_refused(folds: int, groups: Any, times: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(PatientSplit(folds).split(WHO, groups=groups, times=times))
