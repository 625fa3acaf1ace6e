"""Summaries of results folders whose predictions and records are made here, run by run."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from manydg.cli.studies import show_summaries
from manydg.config import TrainingConfig
from manydg.data.info import TargetSpec
from manydg.errors import DataError, StorageError
from manydg.evaluation.metrics import score, score_patients
from manydg.evaluation.statistics import Interval, patient_difference, patient_intervals
from manydg.files import as_json, with_checksum
from manydg.studies.summary import load_predictions, summarize, summarize_folder, wide_differences, write_summary
from manydg.targets import target_of
from manydg.training.record import RunRecord, cautions

SKILL = {"base": 0.8, "prototype": 0.9, "dann": 0.7, "manydg": 1.4}


def write_run(folder: Path, algorithm: str, seed: int, kind: str = "classes", **changes: Any) -> RunRecord:
    """One run on the split of its seed: predictions on disk and a record made from them."""
    target = target_of(TargetSpec(kind, ("a", "b", "c")[: 2 if kind == "binary" else 3]))
    people = np.random.default_rng(seed).permutation(30)[:10]
    patient = np.repeat(np.arange(10), 12)
    truth = np.random.default_rng(seed + 100).integers(0, target.size, 120)
    noise = np.random.default_rng(abs(hash((len(algorithm), seed))) % 2**32).normal(size=(120, target.size))
    logits = noise + SKILL.get(algorithm, 1.0) * np.eye(target.size)[truth]
    if kind == "multilabel":
        truth, probabilities = np.eye(3, dtype=int)[truth], 1 / (1 + np.exp(-logits))
    else:
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    names = np.array([f"P-{person:04x}" for person in people])
    run = f"{algorithm}-{seed}"
    place = folder / "runs" / run
    place.mkdir(parents=True, exist_ok=True)
    arrays = {"split": np.ones(120, np.int8), "row": np.arange(120), "patient": patient, "pseudonyms": names}
    np.savez(place / "predictions.npz", **arrays, probabilities=probabilities.astype(np.float32), truth=truth)
    each = score_patients(target, truth, probabilities, patient)
    record = RunRecord.from_json({
        "schema": 1, "run": run, "experiment": "compare", "variant": {}, "algorithm": algorithm, "seed": seed,
        "dataset": "toy", "dataset_hash": "abc", "target": {"kind": kind, "names": list(target.spec.names)},
        "patients": {"train": 16, "val": 4, "test": 10}, "samples": {"test": 120}, "epoch": 1,
        "code_version": "1", "threshold": None,
        "selection_rule": f"epoch with the highest validation {target.selection}",
        "threshold_rule": "highest probability",
        "test": as_json(score(target, truth, probabilities)),
        "per_patient": {str(names[code]): as_json(values) for code, values in each.items()},
        "seconds": 2.0, "status": "ok", "error": None, "folder": f"runs/{run}",
    } | changes)  # fmt: skip
    record.write(place / "run.json")
    return record


def write_study(folder: Path, kind: str = "classes", seeds: int = 4) -> list[RunRecord]:
    records = [write_run(folder, algorithm, seed, kind) for algorithm in reversed(SKILL) for seed in range(seeds)]
    (folder / "results.jsonl").write_text("".join(record.to_line() + "\n" for record in records))
    return records


def failure(algorithm: str, seed: int, error: str = "Traceback\nValueError: the loss is not finite") -> RunRecord:
    config = TrainingConfig(algorithm=algorithm, seed=seed)
    return RunRecord(
        run="x", experiment="compare", algorithm=algorithm, seed=seed, dataset="toy", config=config, status="failed",
        error=error,
    )  # fmt: skip


def test_a_run_that_knew_earlier_labels_is_a_row_of_its_own_with_a_note(tmp_path: Path) -> None:
    knew = [write_run(tmp_path, "base", seed, known_labels="earlier") for seed in range(4)]
    line = knew[0].to_line()
    assert '"known_labels": "earlier"' in line
    assert RunRecord.from_line(line.encode(), "the line") == knew[0]
    plain = write_study(tmp_path)
    assert "known_labels" not in plain[0].to_line()
    summary = summarize([*plain, *knew])
    assert "base (labels of earlier samples known)" in summary.rows
    assert (
        "some rows knew labels of the patients they were tested on: compare them with each other alone" in summary.notes
    )
    assert not any("knew labels" in note for note in summarize(plain).notes)
    with pytest.raises(StorageError, match="known_labels is 'later', not one of some, earlier"):
        RunRecord.from_json({**knew[0].to_json(), "known_labels": "later"})


def test_rows_run_from_base_over_controls_and_rivals_to_manydg(tmp_path: Path) -> None:
    records = write_study(tmp_path) + [write_run(tmp_path, "own-idea", 0)]
    assert summarize(records).rows == ("base", "prototype", "dann", "own-idea", "manydg")


def test_means_tests_and_intervals_are_those_computed_one_by_one(tmp_path: Path) -> None:
    records = write_study(tmp_path)
    summary = summarize_folder(tmp_path)[0]
    entry = summary.entries["dann", "kappa"]
    ours, theirs = ([r for r in records if r.algorithm == name] for name in ("dann", "manydg"))
    first, second = ([r.test["kappa"] for r in runs] for runs in (ours, theirs))
    assert entry.mean == pytest.approx(np.mean(first))
    assert entry.sd == pytest.approx(np.std(first, ddof=1))
    assert entry.comparison is not None
    assert entry.comparison.t_p == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert entry.comparison.corrected_p > entry.comparison.t_p
    loaded = [[load_predictions(tmp_path, record) for record in runs] for runs in (ours, theirs)]
    alone = patient_intervals([run for run in loaded[0] if run])["kappa"]
    assert entry.interval is not None
    assert entry.interval.estimate == pytest.approx(entry.mean)
    assert (entry.interval.low, entry.interval.high) == pytest.approx((alone.low, alone.high), abs=0.02)
    gap = patient_difference([run for run in loaded[1] if run], [run for run in loaded[0] if run])["kappa"]
    assert entry.difference is not None
    assert entry.difference.estimate == pytest.approx(entry.comparison.difference)
    assert entry.comparison.difference == pytest.approx(np.mean(second) - np.mean(first))
    assert (entry.difference.low, entry.difference.high) == pytest.approx((gap.low, gap.high), abs=0.02)


def test_holm_counts_the_rows_compared(tmp_path: Path) -> None:
    summary = summarize(write_study(tmp_path))
    plain = [summary.entries[row, "kappa"].comparison.t_p for row in summary.rows[:-1]]  # type: ignore[union-attr]
    smallest = int(np.argmin(plain))
    adjusted = summary.entries[summary.rows[smallest], "kappa"].adjusted
    assert adjusted is not None
    assert adjusted["t"] == pytest.approx(min(1.0, 3 * plain[smallest]))
    assert summary.entries["manydg", "kappa"].comparison is None


@pytest.mark.parametrize("kind", ["classes", "votes", "binary", "multilabel"])
def test_every_target_kind_is_summed_up_in_its_own_metrics(tmp_path: Path, kind: str) -> None:
    write_study(tmp_path, kind, seeds=2)
    summary = summarize_folder(tmp_path, resamples=50)[0]
    target = target_of(TargetSpec(kind, ("a", "b", "c")[: 2 if kind == "binary" else 3]))
    assert summary.metrics == target.metrics
    assert all(entry.interval is not None for entry in summary.entries.values())
    Console(file=io.StringIO(), width=200).print(summary.to_rich())


def test_a_row_that_tested_two_patients_has_no_interval_whomever_other_rows_tested(tmp_path: Path) -> None:
    records = write_study(tmp_path)
    few = next(record for record in records if record.run == "dann-0")
    two = dict(list(few.per_patient.items())[:2])
    summary = summarize([r for r in records if r.algorithm != "dann"] + [few.replace(per_patient=two)])
    entry, other = (summary.entries[row, "accuracy"] for row in ("dann", "base"))
    assert entry.interval is not None
    assert entry.interval.note == "no interval: 2 patients"
    assert other.interval is not None
    assert other.interval.note == ""


def test_records_alone_give_intervals_where_patients_values_suffice(tmp_path: Path) -> None:
    records = write_study(tmp_path)
    with_predictions, alone = summarize_folder(tmp_path)[0], summarize(records)
    for row in alone.rows:
        found, wanted = (each.entries[row, "accuracy"].interval for each in (alone, with_predictions))
        assert found is not None
        assert wanted is not None
        assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
        assert alone.entries[row, "kappa"].interval is None
    assert any("16 of 16 runs have no predictions" in note for note in alone.notes)
    assert with_predictions.notes == ()


def test_a_failed_run_is_named_with_its_reason_and_its_row_says_how_many_seeds(tmp_path: Path) -> None:
    records = [r for r in write_study(tmp_path) if r.run != "dann-2"] + [failure("dann", 2)]
    summary = summarize(records)
    assert "dann, seed 2 failed: ValueError: the loss is not finite" in summary.notes
    assert "| dann | 3 of 4 |" in summary.to_markdown()
    assert summary.entries["dann", "kappa"].comparison.pairs == 3  # type: ignore[union-attr]


def test_an_algorithm_that_failed_everywhere_stays_in_the_table(tmp_path: Path) -> None:
    summary = summarize([*write_study(tmp_path), *(failure("irm", seed) for seed in range(4))])
    assert "| irm | 0 of 4 | – | – | – |" in summary.to_markdown()
    assert summary.rows[-1] == "manydg"


def test_a_failure_that_a_later_run_made_good_is_not_mentioned(tmp_path: Path) -> None:
    assert not any("failed" in note for note in summarize([failure("dann", 2), *write_study(tmp_path)]).notes)


def test_a_failure_after_a_run_that_counts_is_mentioned(tmp_path: Path) -> None:
    notes = summarize([*write_study(tmp_path), failure("dann", 2)]).notes
    assert "dann, seed 2 failed: ValueError: the loss is not finite; an earlier run counts" in notes


def test_of_a_run_that_was_made_twice_the_last_counts_and_it_is_said(tmp_path: Path) -> None:
    records = write_study(tmp_path)
    first = next(record for record in records if record.run == "base-1")
    again = first.replace(run="base-1-again", test={**first.test, "kappa": 0.123})
    summary = summarize([*records, again])
    assert summary.entries["base", "kappa"].values[1] == 0.123
    assert "base, seed 1 was run more than once: the last run counts" in summary.notes
    older = summarize([again, *records])
    assert older.entries["base", "kappa"].values[1] == first.test["kappa"]


def test_the_corrected_test_knows_the_ratio_of_test_to_training_patients(tmp_path: Path) -> None:
    """Ten test patients and sixteen training patients: 10 / 16, validation patients not counted."""
    entry = summarize(write_study(tmp_path)).entries["base", "kappa"]
    ours = [record.test["kappa"] for record in write_study(tmp_path) if record.algorithm == "manydg"]
    gaps = np.array(ours, float) - np.array(list(entry.values.values()))
    t = gaps.mean() / (gaps.std(ddof=1) * math.sqrt(1 / 4 + 10 / 16))
    assert entry.comparison is not None
    assert entry.comparison.corrected_p == pytest.approx(2 * stats.t.sf(abs(t), 3))


def test_few_test_patients_are_said_and_ten_are_enough(tmp_path: Path) -> None:
    records = write_study(tmp_path)
    assert not any("a test side has" in note for note in summarize(records).notes)
    few = [record.replace(patients=dataclasses.replace(record.patients, test=9)) for record in records]
    for folds, remedy in ((0, "Test each patient with compare --repeats, or get more patients"), (4, "Get more")):
        dealt = [record.replace(config=record.config.replace(folds=folds)) for record in few]
        assert f"who happens to be in it. {remedy}" in cautions(dealt, "kappa")[0]
    nobody = [few[0].replace(patients=dataclasses.replace(few[0].patients, test=0)), *few[1:]]
    assert cautions(nobody, "kappa")[0].startswith("a test side has 0 patients, fewer than 10")
    summary = summarize(few)
    (note,) = [note for note in summary.notes if "a test side has 9 patients, fewer than 10" in note]
    assert note in summary.to_markdown()
    text = io.StringIO()
    Console(file=text, width=400).print(summary.to_rich(400))
    assert "a test side has 9 patients" in text.getvalue()


def test_a_metric_that_most_patients_do_not_have_is_said(tmp_path: Path) -> None:
    """Ten patients: undefined for five is as good as for four, undefined for six is said."""
    record = write_study(tmp_path, seeds=1)[0]
    for missing, said in ((5, False), (6, True)):
        people = {
            name: {**values, "kappa": None if number < missing else 0.5}
            for number, (name, values) in enumerate(record.per_patient.items())
        }
        notes = cautions([record.replace(per_patient=people)], "kappa")
        assert (notes == []) is not said
        if said:
            assert notes[0].startswith("kappa is undefined within 6 of 10 test patients")
            assert notes[0].endswith("figures per patient are of the other 4")


def test_a_comparison_that_cannot_tell_is_said() -> None:
    """The first interval is 0.21 wide and holds zero; the second is 0.19 wide; the third is wide, but above zero."""
    wide, narrow, clear = Interval(0.02, -0.13, 0.08), Interval(0.02, -0.07, 0.12), Interval(0.2, 0.06, 0.30)
    given = {"base": wide, "dann": narrow, "simd1": clear, "irm": Interval(0.0, math.nan, math.nan)}
    notes = wide_differences("kappa", given)
    assert len(notes) == 1
    assert notes[0].startswith("base: the interval of the difference in kappa, -0.13 to 0.08, is wider than")
    # An error is in the unit of the values, of which nothing is known.
    assert wide_differences("mae", given) == []


def test_a_missing_seed_is_said(tmp_path: Path) -> None:
    records = [r for r in write_study(tmp_path) if r.run not in ("base-1", "base-3")]
    assert "base has no run for seeds 1, 3" in summarize(records).notes


def test_seeds_with_other_test_patients_are_not_paired(tmp_path: Path) -> None:
    records = write_study(tmp_path)
    index = next(i for i, r in enumerate(records) if r.run == "base-0")
    others = {"P-ffff": next(iter(records[index].per_patient.values()))}
    records[index] = records[index].replace(per_patient=others)
    summary = summarize(records)
    assert summary.entries["base", "kappa"].comparison.pairs == 3  # type: ignore[union-attr]
    assert any("not paired" in note for note in summary.notes)


def test_runs_on_an_older_version_of_the_data_are_left_out_and_counted(tmp_path: Path) -> None:
    records = [write_run(tmp_path, "base", 9, dataset_hash="old"), *write_study(tmp_path)]
    summary = summarize(records)
    assert 9 not in summary.entries["base", "kappa"].values
    assert "1 run on another version of the dataset left out" in summary.notes


def test_without_the_reference_there_are_no_tests_and_it_is_said(tmp_path: Path) -> None:
    records = [r for r in write_study(tmp_path) if r.algorithm != "manydg"]
    summary = summarize(records)
    assert summary.reference is None
    assert "no tests: there is no run of the reference manydg; --reference names another" in summary.notes
    assert "Against" not in summary.to_markdown()


def test_one_seed_has_no_deviation_and_no_test_but_a_table(tmp_path: Path) -> None:
    summary = summarize(write_study(tmp_path, seeds=1))
    entry = summary.entries["base", "kappa"]
    assert math.isnan(entry.sd)
    assert "±" not in summary.to_markdown().split("Mean ±")[0]
    assert entry.comparison is not None
    assert "fewer than two seeds" in entry.comparison.note


def test_a_seed_at_which_one_row_has_no_value_counts_in_neither_difference(tmp_path: Path) -> None:
    """At seed 0 nobody is positive: F1 is undefined for the row without an alarm and zero for the other."""
    records = []
    for algorithm, chosen in (("manydg", 0), ("base", 1)):
        for seed in range(3):
            record = write_run(tmp_path, algorithm, seed, "binary")
            if seed == 0:
                file = tmp_path / record.folder / "predictions.npz"
                arrays = dict(np.load(file))
                arrays["truth"][:], arrays["probabilities"][:] = 0, np.eye(2)[chosen]
                np.savez(file, **arrays)
                test = score(target_of(record.target), arrays["truth"], arrays["probabilities"])
                record = record.replace(test=as_json(test))
                record.write(tmp_path / record.folder / "run.json")
            records.append(record)
    predictions = {record.run: load_predictions(tmp_path, record) for record in records}
    entry = summarize(records, predictions).entries["base", "f1"]
    assert entry.comparison is not None
    assert entry.comparison.pairs == 2
    assert entry.difference is not None
    assert entry.difference.estimate == pytest.approx(entry.comparison.difference)


def test_an_undefined_metric_is_an_empty_cell_and_not_a_crash(tmp_path: Path) -> None:
    records = [r.replace(test={**r.test, "auroc": None}) for r in write_study(tmp_path, "binary", seeds=2)]
    summary = summarize(records)
    assert math.isnan(summary.entries["base", "auroc"].mean)
    assert summary.entries["base", "auroc"].rank == 0
    rows = [row for row in csv.DictReader(io.StringIO(summary.to_csv())) if row["metric"] == "auroc"]
    assert {row["mean"] for row in rows} == {""}


def test_the_best_is_bold_the_second_underlined_and_equals_share(tmp_path: Path) -> None:
    kappa = {"base": 0.5, "prototype": 0.7, "dann": 0.6, "manydg": 0.7}
    records = [r.replace(test={**r.test, "kappa": kappa[r.algorithm]}) for r in write_study(tmp_path)]
    ranks = {row: summarize(records).entries[row, "kappa"].rank for row in SKILL}
    assert ranks == {"base": 0, "prototype": 1, "dann": 2, "manydg": 1}
    text = summarize(records).to_markdown()
    assert text.count("**0.7000 ± 0.0000**") == 2
    assert "<u>0.6000 ± 0.0000</u>" in text


def test_a_row_that_lacks_a_split_is_not_the_best(tmp_path: Path) -> None:
    kappa = {"base": 0.5, "prototype": 0.7, "dann": 0.6, "manydg": 0.9}
    records = [r.replace(test={**r.test, "kappa": kappa[r.algorithm]}) for r in write_study(tmp_path)]
    entries = summarize([r for r in records if r.run != "manydg-3"]).entries
    assert {row: entries[row, "kappa"].rank for row in SKILL} == {"base": 0, "prototype": 1, "dann": 2, "manydg": 0}


def test_a_row_whose_splits_were_run_with_other_options_is_said_to_be_mixed(tmp_path: Path) -> None:
    records = write_study(tmp_path)
    longer = [r.replace(config=r.config.replace(epochs=99)) if r.run == "base-1" else r for r in records]
    said = "the runs of base differ in epochs: its mean is of no one configuration"
    assert said in summarize(longer).notes
    assert said not in summarize(longer, tuned=True).notes
    assert not any("differ in" in note for note in summarize(records).notes)


def test_variants_of_one_algorithm_are_rows_of_their_own(tmp_path: Path) -> None:
    records = write_study(tmp_path) + [write_run(tmp_path, "manydg", 0, variant={"mmd": 0.1})]
    assert summarize(records).rows[-2:] == ("manydg", "manydg (mmd 0.1)")


def test_the_files_hold_every_row_and_the_rules(tmp_path: Path) -> None:
    write_study(tmp_path)
    written = write_summary(tmp_path)
    assert [path.name for path in written] == ["summary.csv", "summary.md"]
    rows = list(csv.DictReader(written[0].open()))
    assert len(rows) == 4 * 3
    assert float(rows[0]["low"]) < float(rows[0]["mean"]) < float(rows[0]["high"])
    text = written[1].read_text()
    assert "epoch with the highest validation kappa" in text
    assert "With 4 seeds the Wilcoxon p cannot fall below 0.125." in text
    assert "4 splits by patient; of the patients of a split 16 train, 4 validate" in text


def test_a_folder_of_several_experiments_gets_a_section_each(tmp_path: Path) -> None:
    records = write_study(tmp_path, seeds=2) + [write_run(tmp_path, "base", 0, experiment="weights")]
    (tmp_path / "results.jsonl").write_text("".join(record.to_line() + "\n" for record in records))
    text = write_summary(tmp_path)[1].read_text()
    assert "## compare on toy" in text
    assert "## weights on toy" in text
    with pytest.raises(DataError, match="one experiment on one dataset"):
        summarize(records)


def test_nothing_but_failures_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no run ended well.*not finite"):
        summarize([failure("base", 0)])
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(DataError, match="is empty"):
        write_summary(tmp_path)


def test_damaged_predictions_are_named(tmp_path: Path) -> None:
    write_study(tmp_path, seeds=1)
    (tmp_path / "runs" / "base-0" / "predictions.npz").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(
        StorageError, match=r"base-0.predictions\.npz is damaged or was changed.*delete .*base-0 and run the study"
    ):
        write_summary(tmp_path)


@pytest.mark.parametrize(("width", "extras"), [(70, []), (140, ["10th pct.", "Hedges", "s/run"])])
def test_a_narrow_terminal_gets_what_matters_and_a_wide_one_the_rest(
    tmp_path: Path, width: int, extras: list[str]
) -> None:
    write_study(tmp_path)
    text = io.StringIO()
    Console(file=text, width=width).print(summarize_folder(tmp_path)[0].to_rich(width))
    shown = text.getvalue()
    assert "t, corrected" in shown
    assert "[0." in shown
    assert [name for name in ("10th pct.", "Hedges", "s/run") if name in shown] == extras
    assert not any(line.rstrip().endswith("±") for line in shown.splitlines())


def test_a_table_that_goes_to_a_file_is_not_squeezed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    summaries = summarize_folder(tmp_path)
    show_summaries(tmp_path, summaries, write_summary(tmp_path, summaries))
    shown = capsys.readouterr().out
    assert "t, corrected" in shown
    assert "s/run" in shown


def test_names_of_rows_are_never_cut(tmp_path: Path) -> None:
    write_study(tmp_path)
    text, summary = io.StringIO(), summarize_folder(tmp_path)[0]
    Console(file=text, width=45).print(summary.to_rich(45))
    assert all(row in text.getvalue() for row in summary.rows)


def test_patients_metrics_are_of_the_patients_that_every_row_has_and_say_how_many(tmp_path: Path) -> None:
    records = write_study(tmp_path, seeds=1)
    gone = next(iter(records[0].per_patient))
    undefined = {
        name: {**values, "kappa": None if name == gone else values["kappa"]}
        for name, values in records[0].per_patient.items()
    }
    summary = summarize([records[0].replace(per_patient=undefined), *records[1:]])
    for record in records:
        entry = summary.entries[record.algorithm, "kappa"]
        kappas = {name: values["kappa"] for name, values in record.per_patient.items() if name != gone}
        assert entry.by_patient == kappas
        assert entry.worst_tenth == pytest.approx(np.percentile([value or 0.0 for value in kappas.values()], 10))
        assert gone in summary.entries[record.algorithm, "accuracy"].by_patient
    lines = [line for line in csv.DictReader(io.StringIO(summary.to_csv())) if line["metric"] == "kappa"]
    assert {(line["worst_tenth_patients"], line["tested_patients"]) for line in lines} == {("9", "10")}
    assert "Kappa, 10th percentile of 9 of 10 patients" in summary.to_markdown()
    text = io.StringIO()
    Console(file=text, width=160).print(summary.to_rich(160))
    assert "9 of 10" in text.getvalue()


def test_a_tenth_percentile_above_the_pooled_value_is_not_shown_and_the_reason_is_given(tmp_path: Path) -> None:
    records = write_study(tmp_path)
    better_within = [
        record.replace(per_patient={name: {"kappa": 0.95, "samples": 12} for name in record.per_patient})
        for record in records
    ]
    summary = summarize(better_within)
    assert all(math.isnan(summary.entries[row, "kappa"].worst_tenth) for row in summary.rows)
    assert any("it would exceed the value over all samples" in note for note in summary.notes)
    rows = csv.DictReader(io.StringIO(summary.to_csv()))
    kappa = [row for row in rows if row["metric"] == "kappa"]
    assert all(row["worst_tenth"] == "" and "would exceed" in row["note"] for row in kappa)
    as_is = summarize(records)
    assert all(as_is.entries[row, "kappa"].worst_tenth < as_is.entries[row, "kappa"].mean for row in as_is.rows)


def test_synthetic_data_are_called_synthetic_in_every_table(tmp_path: Path) -> None:
    records = [record.replace(synthetic=True) for record in write_study(tmp_path, seeds=2)]
    (tmp_path / "results.jsonl").write_text("".join(record.to_line() + "\n" for record in records))
    written = write_summary(tmp_path)
    assert {row["synthetic"] for row in csv.DictReader(written[0].open())} == {"yes"}
    markdown = written[1].read_text()
    assert "## compare on toy (synthetic data)" in markdown
    assert "(difference = manydg minus row; synthetic data)" in markdown
    text = io.StringIO()
    Console(file=text, width=160).print(summarize_folder(tmp_path, resamples=20)[0].to_rich(160))
    assert "compare on toy (synthetic data): unseen patients" in text.getvalue()


def test_what_the_study_says_of_its_data_counts_where_records_do_not_say_it(tmp_path: Path) -> None:
    write_study(tmp_path, seeds=1)
    about = {"datasets": {"toy": {"provenance": {"source": "iiic", "synthetic": True}}}}
    (tmp_path / "study.json").write_text(json.dumps(with_checksum(about)))
    assert summarize_folder(tmp_path, resamples=20)[0].synthetic


def test_seconds_are_the_median_of_the_runs(tmp_path: Path) -> None:
    records = [record.replace(seconds=40.0 if record.seed == 0 else 2.0) for record in write_study(tmp_path)]
    assert set(summarize(records).seconds.values()) == {2.0}
