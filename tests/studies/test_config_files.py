"""Settings: the paper's in files, the user's over them, and every mistake refused with the nearest name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manydg.algorithms import ALGORITHMS
from manydg.backbones import BACKBONES
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset
from manydg.data.info import Provenance
from manydg.errors import ConfigError, ManyDGError, StorageError
from manydg.studies.settings import (
    Options,
    changed,
    preset_names,
    preset_text,
    read_preset,
    read_settings,
    shown,
    spelled_out,
)

# Batch, epochs, lr, CondAdv weight and discriminator lr, IRM penalty, MLDG outer and inner lr, width of the head.
TABLE = {
    "iiic": (128, 50, 5e-4, 0.1, 5e-3, 1.0, 5e-4, 1e-3, 16),
    "sleep-edf": (256, 50, 5e-4, 0.1, 5e-3, 1.0, 5e-3, 1e-2, 32),
    "mimic3": (64, 100, 1e-3, 0.01, 1e-3, 5.0, 1e-3, 1e-3, 64),
    "eicu": (256, 50, 5e-4, 0.1, 5e-4, 50.0, 5e-4, 1e-3, 16),
}
BACKBONE = {
    "iiic": ("seizure-cnn", {"window": 64, "hop": 32}),
    "sleep-edf": ("sleep-cnn", {"window": 256, "hop": 64}),
    "mimic3": ("gamenet", {"width": 64}),
    "eicu": ("event-transformer", {"width": 128, "layers": 3, "heads": 8, "hidden": 64, "dropout": 0.25}),
}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", TABLE)
def test_presets_hold_the_papers_settings(name: str) -> None:
    batch, epochs, lr, adversary, discriminator_lr, irm, outer, inner, hidden = TABLE[name]
    options = read_preset(name)
    for algorithm in ("base", "manydg", "dann"):
        config = options.of(algorithm)
        assert (config.batch_size, config.epochs, config.lr, config.weight_decay) == (batch, epochs, lr, 1e-5)
        assert config.ratios == (0.8, 0.1, 0.1)
    heads = ("base", "condadv", "dann", "irm", "mldg", "sagnet", "ema", "groupdro", "manydg-context")
    assert {algorithm: options.of(algorithm).settings["hidden"] for algorithm in heads} == dict.fromkeys(heads, hidden)
    assert "hidden" not in options.of("manydg").settings
    assert (options.of("condadv").settings["weight"], options.of("condadv").settings["inner_steps"]) == (adversary, 5)
    assert options.of("condadv").settings["discriminator_lr"] == discriminator_lr
    assert options.of("dann").settings["weight"] == 0.1
    assert options.of("irm").settings["weight"] == irm
    assert options.of("mldg").lr == outer
    assert {key: options.of("mldg").settings[key] for key in ("inner_lr", "loops", "test_share")} == {
        "inner_lr": inner, "loops": 3, "test_share": 0.1,
    }  # fmt: skip
    keys = ("supervised", "mmd", "reconstruction", "similarity", "temperature")
    weights = (1, 0.2, 0.2, 2, 0.5) if name == "iiic" else (1, 1, 1, 1, 0.5)
    for ours in (options.of("manydg").settings, options.of("manydg-random-pairs").settings):
        settings = dataclasses.asdict(ALGORITHMS.get("manydg").settings_from(ours))
        assert tuple(settings[key] for key in keys) == weights
    backbone, expected = BACKBONE[name]
    assert options.common.backbone == backbone
    assert {key: options.common.backbone_options[key] for key in expected} == expected


def test_an_algorithms_own_head_comes_before_the_one_for_all(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.toml", 'extends = "iiic"\n[head]\nhidden = 24\n[algorithms.dann]\nhidden = 48\n')
    options = read_settings(file)
    assert [options.of(name).settings["hidden"] for name in ("base", "dann")] == [24, 48]
    said = changed(options, training={}, backbone=None, sets={"base.hidden": 8})
    assert [said.of(name).settings["hidden"] for name in ("base", "dann", "irm")] == [8, 48, 24]
    with pytest.raises(ConfigError, match=r"mine.toml.*setting of base 'hiden'.*hidden"):
        read_settings(write(tmp_path / "mine.toml", "[head]\nhiden = 24\n"))


@pytest.mark.parametrize("name", TABLE)
def test_presets_say_what_each_value_is(name: str) -> None:
    text = shown(name)
    assert text == preset_text(name)
    assert text.startswith("# ")
    assert text.count("#") > 15
    assert set(tomllib.loads(text)) == {"training", "backbone", "head", "algorithms"}


@pytest.mark.parametrize("name", [*ALGORITHMS.names(), *BACKBONES.names()])
def test_what_show_prints_for_an_algorithm_or_a_backbone_is_a_settings_file(name: str, tmp_path: Path) -> None:
    options = read_settings(write(tmp_path / "printed.toml", shown(name)))
    if name in ALGORITHMS.names():
        assert ALGORITHMS.get(name).settings_from(options.of(name).settings) == ALGORITHMS.get(name).Settings()
    else:
        assert options.common.backbone == name


def test_settings_of_one_algorithm_are_its_alone() -> None:
    options = Options(TrainingConfig(lr=1e-3), {"mldg": {"lr": 5e-3, "weight": 2.0}, "irm": {"weight": 7.0}})
    assert (options.of("mldg").lr, options.of("irm").lr) == (5e-3, 1e-3)
    assert (options.of("mldg").settings, options.of("irm").settings) == ({"weight": 2.0}, {"weight": 7.0})
    assert options.of("base").settings == {}


def test_the_command_line_comes_before_the_file_and_an_algorithms_own_word_before_the_rest() -> None:
    base = read_preset("sleep-edf")
    options = changed(base, training={"lr": 1e-2, "epochs": 3}, backbone=None, sets={"manydg.mmd": 0.2})
    assert {options.of(name).lr for name in ("mldg", "base", "manydg")} == {1e-2}
    assert options.of("mldg").settings["inner_lr"] == 1e-2
    assert options.of("manydg").settings["mmd"] == 0.2
    assert options.of("manydg-random-pairs").settings.get("mmd") is None
    again = changed(
        base, training={"lr": 1e-2}, backbone=None, sets={"mldg.lr": 3e-3, "training.ratios": [0.6, 0.2, 0.2]}
    )
    assert (again.of("mldg").lr, again.of("base").lr) == (3e-3, 1e-2)
    assert again.of("base").ratios == (0.6, 0.2, 0.2)


def test_another_backbone_has_no_options_of_the_one_it_replaces() -> None:
    options = changed(read_preset("sleep-edf"), training={}, backbone="seizure-cnn", sets={"backbone.dropout": 0.1})
    assert (options.common.backbone, options.common.backbone_options) == ("seizure-cnn", {"dropout": 0.1})


def test_a_file_may_build_on_a_preset(tmp_path: Path) -> None:
    text = 'extends = "sleep-edf"\n[training]\nepochs = 5\n[algorithms.mldg]\nloops = 1\n'
    options = read_settings(write(tmp_path / "mine.toml", text))
    assert (options.common.epochs, options.common.batch_size) == (5, 256)
    assert (options.of("mldg").settings["loops"], options.of("mldg").lr) == (1, 5e-3)
    assert options.common.backbone_options["window"] == 256
    other = 'extends = "sleep-edf"\n[backbone]\nname = "mlp"\n'
    assert read_settings(write(tmp_path / "other.toml", other)).common.backbone_options == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainning]\nepochs = 1\n", "did you mean 'training'"),
        ("[training]\nepoch = 1\n", "did you mean 'epochs'"),
        ("[training]\nepochs = 0\n", "epochs is 0"),
        ("[training]\nlr = -1.0\n", "lr is -1.0"),
        ("[training]\nlr = 'fast'\n", "lr is 'fast'"),
        ("[training]\nalgorithm = 'base'\n", "unknown training option 'algorithm'"),
        ("training = 3\n", "'training'"),
        ("[backbone]\nname = 'sleep-cn'\n", "did you mean 'sleep-cnn'"),
        ("[backbone]\nnam = 'sleep-cnn'\n", "did you mean 'name'"),
        ("[backbone]\nname = 'mlp'\n[backbone.options]\nhiden = 3\n", "did you mean 'hidden'"),
        ("[algorithms.manydgg]\nmmd = 1\n", "did you mean 'manydg'"),
        ("[algorithms.manydg]\nmdm = 1.0\n", "did you mean 'mmd'"),
        ("[algorithms.manydg]\nmmd = -1.0\n", "it must be a finite number of at least 0"),
        ("[algorithms.manydg]\nmmd = 'much'\n", "must be a number, such as"),
        ("[algorithms.manydg]\npredictor = 'iner'\n", "did you mean 'inner'"),
        ("[algorithms.mldg]\nlrr = 1.0\n", "did you mean 'lr'"),
        ("[algorithms.mldg]\nlr = -1.0\n", "lr is -1.0"),
        ("extends = 'sleep-ed'\n", "did you mean 'sleep-edf'"),
    ],
)
def test_a_mistake_in_a_file_is_refused_with_the_file_and_the_nearest_name(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path / "mine.toml", text)
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_a_file_that_is_absent_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"mine\.toml"):
        read_settings(tmp_path / "mine.toml")
    with pytest.raises(StorageError, match="no TOML"):
        read_settings(write(tmp_path / "bad.toml", "[training\n"))
    with pytest.raises(ConfigError, match="did you mean 'sleep-edf'"):
        read_settings("sleepedf")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"mmd": 1.0}, "whose setting"),
        ({"manydg.mdm": 1.0}, "did you mean 'mmd'"),
        ({"manydgg.mmd": 1.0}, "did you mean 'manydg'"),
        ({"training.epoch": 1}, "did you mean 'epochs'"),
        ({"backbone.hiden": 1}, "did you mean 'hidden'"),
    ],
)
def test_a_mistake_on_the_command_line_is_refused(sets: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(Options(TrainingConfig(backbone="mlp")), training={}, backbone=None, sets=sets)


def test_equal_runs_are_equal_however_they_are_asked_for(small_dataset: DomainDataset) -> None:
    short = spelled_out(TrainingConfig(algorithm="manydg"), small_dataset)
    long = TrainingConfig(algorithm="manydg", settings={"mmd": 1.0}, backbone="mlp", selection="kappa")
    assert short == spelled_out(long, small_dataset)
    assert short.settings["temperature"] == 0.5
    assert short.backbone_options["width"] == 128
    assert short != spelled_out(TrainingConfig(algorithm="manydg", settings={"mmd": 2.0}), small_dataset)


def test_settings_are_read_without_pydantic_where_no_file_of_the_users_is_read() -> None:
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from manydg.studies.settings import read_preset\n"
        "import manydg.studies.conduct\n"
        "print(read_preset('eicu').of('irm').settings['weight'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "50.0\n", done.stderr


@pytest.fixture(scope="module")
def tiny_sleep(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense features that say they come from Sleep-EDF, as twins and real nights do."""
    data = dataset_of(patients=12)
    told = replace(data, info=replace(data.info, provenance=Provenance("sleep-edf")))
    return told.save(tmp_path_factory.mktemp("data") / "nights")


def test_a_dataset_of_a_known_source_gets_its_preset_and_the_command_says_so(
    commands: Any, tiny_sleep: Path, tmp_path: Path
) -> None:
    options = ["--epochs", 1, "--backbone", "mlp", "--out"]
    code, _, err = commands.run("train", tiny_sleep, "--algorithm", "base", *options, tmp_path / "run")
    assert code == 0, err
    assert "settings: the paper's settings for sleep-edf" in err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["settings"] == {"hidden": 32}
    assert (record["config"]["epochs"], record["config"]["batch_size"]) == (1, 256)
    assert record["config"]["backbone"] == "mlp"
    code, _, err = commands.run(
        "train", tiny_sleep, "--config", "none", "--set", "mmd=0.5", "--batch-size", 16, *options, tmp_path / "own"
    )
    assert code == 0, err
    assert "settings:" not in err
    record = json.loads((tmp_path / "own" / "run.json").read_text())
    assert (record["config"]["settings"]["mmd"], record["config"]["batch_size"]) == (0.5, 16)


def test_compare_gives_each_algorithm_its_own_settings_and_keeps_them_in_its_records(
    commands: Any, tiny_sleep: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "mine.toml", "[training]\nepochs = 1\nlr = 1e-3\n[algorithms.mldg]\nlr = 2e-3\nloops = 1\n")
    code, _, err = commands.run(
        "compare", tiny_sleep, "--config", file, "--algorithms", "mldg,irm", "--seeds", 1, "--set", "irm.weight=3",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0, err
    records = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    kept = {record["algorithm"]: record["config"] for record in records}
    assert (kept["mldg"]["lr"], kept["irm"]["lr"]) == (2e-3, 1e-3)
    assert (kept["mldg"]["settings"]["loops"], kept["irm"]["settings"]["weight"]) == (1, 3)
    assert "loops" not in kept["irm"]["settings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "sleep-edff"], "did you mean 'sleep-edf'"),
        (["--set", "manydg.mdm=1"], "did you mean 'mmd'"),
        (["--set", "mmd=1"], "whose setting"),
        (["--backbone", "mpl"], "did you mean 'mlp'"),
    ],
)
def test_the_command_refuses_in_one_line(
    commands: Any, tiny_sleep: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, _, err = commands.run("compare", tiny_sleep, "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert message in err
    assert len([line for line in err.splitlines() if not line.startswith("settings:")]) == 1


def test_show_lists_prints_and_refuses(commands: Any) -> None:
    code, out, _ = commands.run("show")
    assert code == 0
    assert out.splitlines()[0] == "presets: " + ", ".join(preset_names())
    assert commands.run("show", "sleep-edf")[1] == preset_text("sleep-edf")
    code, _, err = commands.run("show", "sleep")
    assert code == 2
    assert "did you mean" in err
    with pytest.raises(ManyDGError):
        shown("nothing-like-it")
