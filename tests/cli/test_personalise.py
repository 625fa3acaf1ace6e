"""``manydg personalise``: what a label can reach, seen by changing files, and what is said of files that do not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from manydg.errors import DataError
from manydg.predict import LabelFile
from manydg.training.personal import AUTO, LEARNERS, PERSONAL, Chain, Strengths, read_population, write_population
from manydg.training.record import RunRecord, read_tensors, write_tensors

PATIENTS, SAMPLES = 24, 12


def table(seed: int) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(PATIENTS), SAMPLES)
    x = rng.normal(size=(len(who), 2))
    ill = x[:, 0] + 2 * rng.normal(size=PATIENTS)[who] > 0
    hours = {"who": [f"p{code}" for code in who], "hour": np.tile(np.arange(SAMPLES), PATIENTS)}
    return pl.DataFrame({**hours, "a": x[:, 0], "b": x[:, 1], "state": np.where(ill, "ill", "well")})


@pytest.fixture(scope="module")
def made(commands: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without context, one with causal context, new patients and labels of their first four samples."""
    folder: Path = tmp_path_factory.mktemp("made")
    table(0).write_csv(folder / "old.csv")
    new = table(1)
    new.write_csv(folder / "new.csv")
    labels = new.with_row_index("row").filter(pl.col("hour") % 3 == 0).select("row", label="state")
    labels.write_csv(folder / "labels.csv")
    for arguments in (
        ("prepare", "table", "old.csv", "--patient", "who", "--target", "state", "--time", "hour", "--features", "a",
         "b", "--out", "data"),
        ("train", "data", "--algorithm", "base", "--epochs", 2, "--out", "run"),
        ("train", "data", "--algorithm", "base", "--epochs", 1, "--context", "causal", "--out", "causal"),
    ):  # fmt: skip
        code, _, err = commands.run(*arguments, folder=folder)
        assert code == 0, err
    for run in ("run", "causal"):
        make_strong(folder / run)
    return folder


def make_strong(run: Path) -> None:
    """Let every learner make much of labels, whatever was chosen on so few validation patients."""
    population = read_population(run, 2)
    assert population is not None
    strong = Strengths(intercept=1.0, slope=0.3, head=0.5, drift=1.0, length=3.0, prototypes=1.0, temper=0.3, steps=10)
    chain = Chain(np.array([[0.8, 0.2], [0.3, 0.7]]), population.shares)
    strengths = dict.fromkeys(population.strengths, strong)
    write_population(run, dataclasses.replace(population, strengths=strengths, chain=chain))
    RunRecord.read(run / "run.json").write(run / "run.json")


def personalised(
    commands: Any, made: Path, out: Path, run: str = "run", learner: str = "effects", **files: pl.DataFrame
) -> pl.DataFrame:
    """What the command predicts, with some of its files replaced."""
    paths = {name: made / f"{name}.csv" for name in ("new", "labels")}
    for name, frame in files.items():
        paths[name] = out.with_name(f"{out.name}-{name}.csv")
        frame.write_csv(paths[name])
    arguments = ("personalise", made / run, paths["new"], "--labels", paths["labels"], "--learner", learner)
    code, _, err = commands.run(*arguments, "--out", out)
    assert code == 0, err
    return pl.read_csv(out / "predictions.csv")


@pytest.mark.parametrize("learner", [name for name in LEARNERS if name != AUTO])
def test_nothing_but_shown_labels_of_the_same_patient_reaches_a_prediction(
    commands: Any, made: Path, tmp_path: Path, learner: str
) -> None:
    new, labels = pl.read_csv(made / "new.csv"), pl.read_csv(made / "labels.csv")
    first = personalised(commands, made, tmp_path / "first", learner=learner)
    assert set(first["row"]).isdisjoint(labels["row"])
    assert len(first) + len(labels) == len(new)
    # The labels in the raw file: none of them is read.
    hidden = new.with_columns(state=pl.lit("well"))
    assert personalised(commands, made, tmp_path / "hidden", learner=learner, new=hidden).equals(first)
    # Labels and inputs of the other patients.
    swapped = pl.when(pl.col("label") == "ill").then(pl.lit("well")).otherwise(pl.lit("ill"))
    others = labels.with_columns(label=pl.when(pl.col("row") < SAMPLES).then("label").otherwise(swapped))
    moved = new.with_columns(a=pl.when(pl.col("who") == "p0").then("a").otherwise(pl.col("a") * 7 + 3))
    changed = personalised(commands, made, tmp_path / "others", learner=learner, labels=others, new=moved)
    assert changed.filter(pl.col("row") < SAMPLES).equals(first.filter(pl.col("row") < SAMPLES))
    assert not changed.equals(first)


@pytest.mark.parametrize("learner", [name for name in LEARNERS if name != AUTO])
def test_with_causal_context_later_labels_and_inputs_do_not_reach_earlier_samples(
    commands: Any, made: Path, tmp_path: Path, learner: str
) -> None:
    new, labels = pl.read_csv(made / "new.csv"), pl.read_csv(made / "labels.csv")
    first = personalised(commands, made, tmp_path / "first", "causal", learner)
    late, swapped = pl.col("row") % SAMPLES >= 6, pl.when(pl.col("label") == "ill").then(pl.lit("well"))
    later = labels.with_columns(label=pl.when(late).then(swapped.otherwise(pl.lit("ill"))).otherwise("label"))
    moved = new.with_columns(a=pl.when(pl.col("hour") >= 7).then(pl.col("a") + 5).otherwise("a"))
    changed = personalised(commands, made, tmp_path / "later", "causal", learner, labels=later, new=moved)
    assert changed.filter(~late).equals(first.filter(~late))
    assert not changed.filter(late).equals(first.filter(late))
    about = json.loads((tmp_path / "first" / "about.json").read_text())["personalised"]
    assert about["labels used for a sample"] == "those of the same patient, of earlier samples alone"
    assert about["labelled samples"] == len(labels)
    assert about["learner"] == learner
    assert about.get("samples read beside it") == ("earlier ones of the same patient" if learner == "markov" else None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("row,label\n1,sick\n", "labels.csv: row 1: 'sick' is not one of the model's labels (ill, well)"),
        ("row,label\n99999,ill\n", "labels.csv: no sample has row 99999"),
        ("row,label\n1,ill\n1,well\n", "labels.csv, line 3: it names a sample for the second time"),
        ("row,label\n1,\n", "labels.csv, line 2: it lacks a value"),
        ("row,label\n", "labels.csv has no rows: add labels, or use 'manydg predict'"),
        ("row\n1\n", "it needs 'label' and a column that says which sample"),
        ("hour,label\n1,ill\n", "samples have no column 'hour'; theirs are row"),
    ],
)
def test_a_file_of_labels_that_does_not_fit_is_one_line_and_writes_nothing(
    commands: Any, made: Path, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "labels.csv").write_text(text)
    arguments = ("personalise", made / "run", made / "new.csv", "--labels", tmp_path / "labels.csv")
    code, out, err = commands.run(*arguments, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]


def test_a_label_is_of_one_sample_where_recordings_come_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("row,label\n1,W\n")
    night = {name: pl.DataFrame({"recording": [name] * 3, "row": [0, 1, 2]}) for name in ("a", "b")}
    labels = LabelFile.read(tmp_path / "labels.csv")
    assert labels.of(night["a"], multilabel=False) == [None, "W", None]
    with pytest.raises(DataError, match=r"row alone does not tell samples apart: add a column, such as 'recording'"):
        labels.of(night["b"], multilabel=False)
    (tmp_path / "labels.csv").write_text("recording,row,label\nb,1,W\n")
    labels = LabelFile.read(tmp_path / "labels.csv")
    assert labels.of(night["a"], multilabel=False) == [None] * 3
    assert labels.of(night["b"], multilabel=False) == [None, "W", None]
    labels.check_all_used()


def test_a_run_whose_population_makes_no_sense_predicts_and_does_not_personalise(
    commands: Any, made: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    tensors, meta = read_tensors(run / PERSONAL)
    meta["strengths"]["effects"]["head"] = -1.0
    write_tensors(run / PERSONAL, tensors, meta)
    RunRecord.read(run / "run.json").write(run / "run.json")
    for name, folder in (("before", made / "run"), ("after", run)):
        code, _, err = commands.run("predict", folder, made / "new.csv", "--out", tmp_path / name)
        assert code == 0, err
    tables = [(tmp_path / name / "predictions.csv").read_bytes() for name in ("before", "after")]
    assert tables[0] == tables[1]
    labels = ("--labels", made / "labels.csv", "--out", tmp_path / "out")
    code, _, err = commands.run("personalise", run, made / "new.csv", *labels)
    assert code == 2
    assert "personal.safetensors does not hold what personalising needs" in err
