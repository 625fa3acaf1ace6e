"""Tuning: equal budgets, chosen on validation patients alone, the same after a kill, refused where it does not fit."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manydg.algorithms import ALGORITHMS
from manydg.backbones import BACKBONES
from manydg.config import Choices, Range, TrainingConfig
from manydg.data.dataset import DomainDataset, from_arrays, open_dataset
from manydg.errors import ConfigError, StorageError
from manydg.studies import tuning as module
from manydg.studies.records import read_runs
from manydg.studies.settings import Options, backbone_defaults, shown, spelled_out
from manydg.studies.tuning import (
    Search,
    Trial,
    Tuning,
    applied,
    kept_tuning,
    search_space,
    tune,
    values_of,
    with_tuned,
)
from manydg.training.run import draw_split, train

EPOCHS, TRIALS = 3, 3
OPTIONS = Options(TrainingConfig(epochs=EPOCHS))
NAMES = ("base", "boosting")


@pytest.fixture(scope="module")
def dataset(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset_of(patients=20).save(tmp_path_factory.mktemp("data") / "patients")


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search of two algorithms on two splits that nothing disturbed."""
    folder = tmp_path_factory.mktemp("tuning") / "whole"
    tune(dataset, NAMES, folder, trials=TRIALS, seeds=2, options=OPTIONS)
    return folder


def tried(folder: Path) -> list[Any]:
    """Every trial without its seconds."""
    searches = Tuning.read(folder / "tuning.json").searches
    return [
        (search.name, search.test_patients, [dataclasses.replace(trial, seconds=0.0) for trial in search.trials])
        for search in searches
    ]


# What is searched


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_what_show_calls_searched_is_what_is_searched(name: str, dataset: Path) -> None:
    config = spelled_out(TrainingConfig(name), open_dataset(dataset))
    space = search_space(config)
    printed = {}
    for line in (shown(name) + shown(config.backbone)).splitlines():
        text, _, drawn = line.partition("searched from ")
        if drawn:
            key = text.removeprefix("# ").split(" = ")[0].split(":")[0]
            backbone = key in backbone_defaults(config.backbone) and f"backbone.{key}" in space
            printed[key if "." in key else f"backbone.{key}" if backbone else f"{name}.{key}"] = drawn
    if ALGORITHMS.get(name).sampling == "whole":
        printed = {key: drawn for key, drawn in printed.items() if key.startswith(f"{name}.")}
    own = {f"{name}.{key.name}" for key in dataclasses.fields(ALGORITHMS.get(name).Settings)}
    printed = {key: drawn for key, drawn in printed.items() if not key.startswith(f"{name}.") or key in own}
    if factors := printed.get("training.batch_size", "").removesuffix(" times the given value"):
        sizes = (int(float(factor) * config.batch_size) for factor in factors.split(", "))
        printed["training.batch_size"] = ", ".join(map(str, sizes))
    assert printed == {key: str(drawn) for key, drawn in space.items()}
    assert own <= set(space)


@pytest.mark.parametrize("name", BACKBONES.names())
def test_every_backbone_with_the_shared_options_is_searched_over_them(name: str) -> None:
    options = backbone_defaults(name)
    space = search_space(TrainingConfig("base", {"hidden": 32}, name, options))
    assert {key for key in space if key.startswith("backbone.")} == {
        f"backbone.{key}" for key in ("width", "dropout") if key in options
    }


def test_boosting_has_its_own_settings_alone(dataset: Path) -> None:
    space = search_space(spelled_out(TrainingConfig("boosting"), open_dataset(dataset)))
    assert {name.partition(".")[0] for name in space} == {"boosting"}


def test_a_range_is_widened_to_hold_the_default() -> None:
    assert Range(0.1, 1.0, log=True).including(2.0) == Range(0.1, 2.0, log=True)
    assert Range(0.1, 1.0, log=True).including(0.0) == Range(0.0, 1.0, log=False)
    assert Choices((64, 128)).including(100).options == (100, 64, 128)
    config = TrainingConfig("base", {"hidden": 500}, "mlp", {"width": 100, "dropout": 0.9}, batch_size=7, lr=1.0)
    space = search_space(config)
    assert str(space["base.hidden"]) == "8 to 500"
    assert str(space["training.batch_size"]) == "2, 3, 7, 14, 28"
    assert applied(config, values_of(config, space)) == config


def test_values_reach_the_option_they_name() -> None:
    config = TrainingConfig("base", {"hidden": 8}, "mlp", {"width": 64, "dropout": 0.1})
    values = {"training.lr": 1e-3, "backbone.width": 128, "base.hidden": 16}
    changed = applied(config, values)
    assert (changed.lr, changed.backbone_options["width"], changed.settings["hidden"]) == (1e-3, 128, 16)
    assert values_of(changed, values) == values


# The search


def test_every_algorithm_has_the_same_number_of_trials_and_the_defaults_first(dataset: Path, whole: Path) -> None:
    tuning, data = Tuning.read(whole / "tuning.json"), open_dataset(dataset)
    assert [(search.algorithm, search.seed) for search in tuning.searches] == [
        (name, seed) for seed in (0, 1) for name in NAMES
    ]
    for search in tuning.searches:
        assert [trial.number for trial in search.trials] == list(range(TRIALS))
        assert search.base == spelled_out(OPTIONS.of(search.algorithm, search.seed), data)
        assert search.trials[0].values == values_of(search.base, search.space)
        assert len({json.dumps(dict(trial.values)) for trial in search.trials}) == TRIALS
        for trial in search.trials:
            for name, value in trial.values.items():
                drawn = search.space[name]
                assert value in drawn.options if isinstance(drawn, Choices) else drawn.low <= value <= drawn.high


def test_a_trial_is_scored_as_a_run_scores_its_validation_patients(dataset: Path, whole: Path) -> None:
    data = open_dataset(dataset)
    for search in Tuning.read(whole / "tuning.json").searches:
        run = train(data, applied(search.base, search.trials[1].values))
        assert run.record.val["kappa"] == pytest.approx(search.trials[1].score)


def test_the_choice_is_the_best_complete_trial_and_the_earlier_of_equals() -> None:
    scores = [("complete", 0.5), ("pruned", 0.9), ("complete", 0.7), ("complete", 0.7), ("failed", None)]
    trials = tuple(Trial(number, {}, state, value) for number, (state, value) in enumerate(scores))
    search = Search("base", 0, TrainingConfig("base"), {}, "", trials)
    assert search.chosen == trials[2]
    assert search.best_so_far() == [0.5, 0.5, 0.7, 0.7, 0.7]
    assert math.isnan(Search("base", 0, TrainingConfig("base"), {}, "", trials[4:]).best_so_far()[0])
    negative = (Trial(0, {}, "complete", -0.2), Trial(1, {}, "complete", -0.1))
    assert Search("base", 0, TrainingConfig("base"), {}, "", negative).chosen == negative[1]


def test_labels_and_inputs_of_test_patients_change_nothing(dataset: Path, whole: Path, tmp_path: Path) -> None:
    data = open_dataset(dataset)
    rows = draw_split(data, TrainingConfig(seed=0)).test
    inputs, labels = data.column("x").numpy().copy(), data.targets.numpy().copy()
    inputs[rows], labels[rows] = 7.0, (labels[rows] + 1) % 3
    spoilt = from_arrays(inputs, labels, data.patients[data.domains.numpy()], kind="classes")
    assert spoilt.content_hash() != data.content_hash()
    folder = spoilt.save(tmp_path / "patients")
    tune(folder, NAMES, tmp_path / "out", trials=TRIALS, seeds=1, options=OPTIONS)
    ours, theirs = tried(tmp_path / "out"), [entry for entry in tried(whole) if entry[0].endswith("split 0")]
    assert [(name, trials) for name, _, trials in ours] == [(name, trials) for name, _, trials in theirs]


def test_no_test_patient_reaches_the_training(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, seen, original = open_dataset(dataset), set(), module.with_context

    def watching(given: DomainDataset, config: TrainingConfig, *rest: Any) -> DomainDataset:
        seen.update((config.seed, str(name)) for name in given.patients)
        return original(given, config, *rest)

    # All that is computed from the data begins with this call.
    monkeypatch.setattr(module, "with_context", watching)
    tune(dataset, ["manydg-context"], tmp_path / "out", trials=2, seeds=2, options=OPTIONS)
    for seed in (0, 1):
        test = draw_split(data, TrainingConfig(seed=seed)).patients("test")
        assert not seen & {(seed, str(name)) for name in test}
        assert len([name for number, name in seen if number == seed]) == data.n_patients - len(test)


def test_more_trials_go_on_where_fewer_ended(dataset: Path, whole: Path, tmp_path: Path) -> None:
    for trials in (1, TRIALS):
        tune(dataset, NAMES, tmp_path / "out", trials=trials, seeds=2, options=OPTIONS)
    assert tried(tmp_path / "out") == tried(whole)


def test_a_search_with_hopeless_trials_stops_them(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopeless = {"training.lr": Range(1e-9, 2e-9, log=True)}
    monkeypatch.setattr(module, "search_space", lambda config: {"training.lr": hopeless["training.lr"].including(5e-3)})
    options = Options(TrainingConfig(epochs=6, lr=5e-3, batch_size=32))
    (search,) = tune(dataset, ["base"], tmp_path / "out", trials=10, seeds=1, options=options).searches
    pruned = [trial for trial in search.trials if trial.state == "pruned"]
    assert pruned
    assert all(2 <= trial.epochs < 6 for trial in pruned)
    assert all(trial.epochs == 6 for trial in search.trials if trial.state == "complete")
    assert all(trial.state == "complete" for trial in search.trials[:4])
    assert search.chosen is not None
    assert all(trial.score is not None and trial.score <= search.chosen.score for trial in pruned)


def test_a_trial_that_fails_counts_and_is_not_chosen(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = Range(1e30, 1e31, log=True)
    monkeypatch.setattr(module, "search_space", lambda config: {"training.lr": huge.including(config.lr)})
    (search,) = tune(dataset, ["base"], tmp_path / "out", trials=6, seeds=1, options=OPTIONS).searches
    failed = [trial for trial in search.trials if trial.state == "failed"]
    assert len(search.trials) == 6
    assert failed
    assert "not finite" in str(failed[0].error) or "loss term" in str(failed[0].error)
    assert search.chosen is not None
    assert search.chosen not in failed


def test_rounds_of_boosting_are_no_epochs_to_stop_at(dataset: Path, tmp_path: Path) -> None:
    options = Options(TrainingConfig(epochs=100), {"boosting": {"rounds": 40}})
    (search,) = tune(dataset, ["boosting"], tmp_path / "out", trials=8, seeds=1, options=options).searches
    assert {(trial.state, trial.epochs) for trial in search.trials} == {("complete", 0)}


def test_a_trial_of_best_is_not_stopped_for_what_one_of_its_learners_reaches(dataset: Path, tmp_path: Path) -> None:
    options = Options(TrainingConfig(epochs=4))
    (search,) = tune(dataset, ["best"], tmp_path / "out", trials=8, seeds=1, options=options).searches
    assert {(trial.state, trial.epochs) for trial in search.trials} == {("complete", 0)}


# Killed, side by side


def arguments(dataset: Path, out: Path, *more: object) -> list[object]:
    asked = ["--algorithms", ",".join(NAMES), "--seeds", 2, "--epochs", EPOCHS, "--trials", TRIALS]
    return ["tune", dataset, "--out", out, "--device", "cpu", *asked, *more]


def test_a_killed_search_goes_on_as_if_nothing_had_happened(
    commands: Any, dataset: Path, whole: Path, tmp_path: Path
) -> None:
    folder, killed = tmp_path / "killed", 0
    for wanted in (2, 6):
        command = commands.start(*arguments(dataset, folder))
        while command.err.count("validation") < wanted:
            time.sleep(0.002)
        command.kill()
        killed += command.wait() == -signal.SIGKILL
    code, out, err = commands.run(*arguments(dataset, folder))
    assert code == 0, err
    assert killed == 2
    assert "done already" in err
    assert "12 trials in all" in out
    assert tried(folder) == tried(whole)


@pytest.mark.slow
def test_a_search_killed_before_each_of_its_writes_ends_with_the_same_trials(
    commands: Any, dataset: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    for write in (1, 2):
        commands.run(*arguments(dataset, folder), die_at=write)
    code, _, err = commands.run(*arguments(dataset, folder))
    assert code == 0, err
    assert tried(folder) == tried(whole)


def test_half_a_line_in_a_journal_is_cleared_away(dataset: Path, whole: Path, tmp_path: Path) -> None:
    tune(dataset, NAMES, tmp_path / "out", trials=2, seeds=2, options=OPTIONS)
    for journal in (tmp_path / "out" / "searches").iterdir():
        with journal.open("ab") as file:
            file.write(b'{"op_code": 6, "worker')
        journal.with_name(journal.name + ".lock").touch()
    tune(dataset, NAMES, tmp_path / "out", trials=TRIALS, seeds=2, options=OPTIONS)
    assert tried(tmp_path / "out") == tried(whole)


@pytest.mark.slow
def test_trials_side_by_side_are_as_many(dataset: Path, whole: Path, tmp_path: Path) -> None:
    tune(dataset, NAMES, tmp_path / "out", trials=TRIALS, seeds=2, options=OPTIONS, workers=2, device="cpu")
    assert [(name, len(trials)) for name, _, trials in tried(tmp_path / "out")] == [
        (name, len(trials)) for name, _, trials in tried(whole)
    ]
    assert [trials[0] for _, _, trials in tried(tmp_path / "out")] == [trials[0] for _, _, trials in tried(whole)]


# What was chosen is used


def test_a_comparison_uses_what_was_chosen_on_each_split(
    commands: Any, dataset: Path, whole: Path, tmp_path: Path
) -> None:
    asked = ["--algorithms", ",".join(NAMES), "--seeds", 2, "--epochs", EPOCHS, "--tuned", whole]
    code, _, err = commands.run("compare", dataset, *asked, "--out", tmp_path / "out")
    assert code == 0, err
    tuning = Tuning.read(whole / "tuning.json")
    assert kept_tuning(tmp_path / "out", "patients") == tuning
    records = read_runs(tmp_path / "out")
    assert len(records) == 4
    for record in records:
        search = tuning.search(record.algorithm, record.seed)
        assert search is not None
        assert search.chosen is not None
        assert values_of(record.config, search.space) == search.chosen.values
        assert record.val["kappa"] == pytest.approx(search.chosen.score)
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "Settings: 3 trials, the first with the defaults, for each algorithm and split" in summary
    assert "(12 trials in all, 0 stopped early, 0 failed)" in summary
    code, _, err = commands.run("compare", dataset, *asked[:-2], "--out", tmp_path / "out")
    assert code == 2
    assert "compares tuned settings on patients: add --tuned, or name another folder" in err


def test_a_run_uses_what_was_chosen_for_its_split(commands: Any, dataset: Path, whole: Path, tmp_path: Path) -> None:
    asked = ["--algorithm", "base", "--seed", 1, "--epochs", EPOCHS, "--tuned", whole]
    code, _, err = commands.run("train", dataset, *asked, "--out", tmp_path / "run")
    assert code == 0, err
    search = Tuning.read(whole / "tuning.json").search("base", 1)
    assert search is not None
    assert search.chosen is not None
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["lr"] == search.chosen.values["training.lr"]
    assert record["val"]["kappa"] == pytest.approx(search.chosen.score)


def test_untuned_results_are_not_mixed_with_tuned_ones(
    commands: Any, dataset: Path, whole: Path, tmp_path: Path
) -> None:
    asked = ["compare", dataset, "--algorithms", "boosting", "--seeds", 1, "--epochs", EPOCHS, "--out", tmp_path]
    assert commands.run(*asked)[0] == 0
    code, _, err = commands.run(*asked, "--tuned", whole)
    assert code == 2
    assert "compares settings that were not tuned on patients: name another folder" in err


def test_settings_of_a_search_under_other_conditions_are_refused(
    dataset: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset_of: Callable[..., DomainDataset],
) -> None:
    data = open_dataset(dataset)

    def refused(options: Options = OPTIONS, data: DomainDataset = data, names: Any = NAMES, seeds: Any = (0, 1)) -> str:
        with pytest.raises(ConfigError) as error:
            with_tuned(options, whole, data, names, seeds)
        return str(error.value)

    assert set(with_tuned(OPTIONS, whole, data, NAMES, (0, 1)).tuned) == {(n, s) for n in NAMES for s in (0, 1)}
    assert "base was tuned with epochs 3, and is asked for with 4" in refused(Options(TrainingConfig(epochs=4)))
    ratios = Options(TrainingConfig(epochs=EPOCHS, ratios=(0.6, 0.2, 0.2)))
    assert "base was tuned with ratios [0.8, 0.1, 0.1]" in refused(ratios)
    assert "another dataset ('patients'" in refused(data=dataset_of(patients=21))
    assert "base was not tuned on split 2" in refused(seeds=range(3))
    assert "dann was not tuned on split 0" in refused(names=["dann"])
    monkeypatch.setattr(module, "_test_patients", lambda data, config: "others")
    assert "had other test patients" in refused()
    monkeypatch.undo()
    monkeypatch.setattr(module, "code_version", lambda: "0.0.0+other")
    assert "was made by another version of the program" in refused()


def test_a_search_that_was_not_finished_is_refused(dataset: Path, whole: Path, tmp_path: Path) -> None:
    tuning = Tuning.read(whole / "tuning.json")
    dataclasses.replace(tuning, trials=4).write(tmp_path / "tuning.json")
    with pytest.raises(ConfigError, match="the search of base split 0 has only 3 of 4 trials"):
        with_tuned(OPTIONS, tmp_path, open_dataset(dataset), NAMES, (0,))


def test_a_search_over_other_settings_is_refused(dataset: Path, whole: Path, tmp_path: Path) -> None:
    tuning = Tuning.read(whole / "tuning.json")
    first = tuning.searches[0]
    wider = dataclasses.replace(first, space={**first.space, "training.lr": Range(1e-9, 1.0, log=True)})
    unknown = dataclasses.replace(first.trials[0], values={**first.trials[0].values, "training.nonsense": 1}, score=9.0)
    for search in (wider, dataclasses.replace(first, trials=(unknown, *first.trials[1:]))):
        dataclasses.replace(tuning, searches=(search,)).write(tmp_path / "tuning.json")
        with pytest.raises(ConfigError, match="the search of base split 0 was over other settings or ranges"):
            with_tuned(OPTIONS, tmp_path, open_dataset(dataset), ["base"], (0,))


# Records and bad input


def test_the_record_is_read_as_it_was_written_and_not_if_it_was_changed(whole: Path, tmp_path: Path) -> None:
    tuning, file = Tuning.read(whole / "tuning.json"), tmp_path / "tuning.json"
    tuning.write(file)
    assert Tuning.read(file) == tuning
    text = file.read_text()
    file.write_text(text.replace('"number": 2', '"number": 1', 1))
    with pytest.raises(StorageError, match="does not match its checksum"):
        Tuning.read(file)
    file.write_text(text[:-20])
    with pytest.raises(StorageError, match=r"tuning\.json"):
        Tuning.read(file)
    with pytest.raises(StorageError, match="is missing: name a folder that 'manydg tune' wrote"):
        Tuning.read(tmp_path / "nothing" / "tuning.json")


def test_a_damaged_journal_is_named(dataset: Path, tmp_path: Path) -> None:
    tune(dataset, ["boosting"], tmp_path, trials=1, seeds=1, options=OPTIONS)
    (journal,) = (tmp_path / "searches").iterdir()
    journal.write_bytes(b"no journal\n" + journal.read_bytes())
    with pytest.raises(StorageError, match=r"is damaged .* delete it and run the same command again"):
        tune(dataset, ["boosting"], tmp_path, trials=2, seeds=1, options=OPTIONS)


def test_what_makes_no_sense_is_refused_in_a_line(
    commands: Any, dataset: Path, whole: Path, tmp_path: Path, dataset_of: Callable[..., DomainDataset]
) -> None:
    other = dataset_of(patients=12).save(tmp_path / "other")
    before = (whole / "tuning.json").read_bytes()
    for more, message in (
        (["--algorithms", "bsae"], "unknown algorithm 'bsae': did you mean 'base'?"),
        (["--algorithms", ","], "name the algorithms to tune"),
        (["--trials", 0], "Invalid value for '--trials'"),
        (["--trials", 2], "base split 0 has 3 trials"),
        (["--epochs", 9], "base was tuned with epochs 3, and is asked for with 9"),
        (["--algorithms", "dann", "--trials", 2], "every algorithm gets the same number"),
    ):
        code, _, err = commands.run(*arguments(dataset, whole, *more))
        assert (code, len(err.splitlines())) == (2, 1), err
        assert message in err
    code, _, err = commands.run(*arguments(other, whole))
    assert code == 2
    assert "is of another dataset ('patients'" in err
    assert (whole / "tuning.json").read_bytes() == before


def test_defaults_that_cannot_work_stop_the_search(dataset: Path, tmp_path: Path) -> None:
    options = Options(TrainingConfig(epochs=1, context="causal"))
    with pytest.raises(ConfigError, match="bn-adapt split 0: bn-adapt cannot be used with causal context"):
        tune(dataset, ["bn-adapt"], tmp_path, trials=3, seeds=1, options=options)


def test_a_missing_optuna_is_named_with_the_command_that_installs_it(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'manydg\[tune\]'"):
        tune(dataset, ["base"], tmp_path / "out", trials=1, seeds=1, options=OPTIONS)
    assert not (tmp_path / "out").exists()
