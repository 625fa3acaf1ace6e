"""Every experiment of the paper on small data of every kind of target, from the plan to the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manydg.algorithms import ALGORITHMS
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError
from manydg.report import write_report
from manydg.studies.catalogue import EXPERIMENTS
from manydg.studies.catalogue.comparisons import WEIGHTS, Objectives, Weights
from manydg.studies.conduct import compare, conduct, fitting, make_request
from manydg.studies.figure_data import CellTable, Curve, Similarity, read_figures
from manydg.studies.records import read_results, views
from manydg.studies.settings import Options, read_preset
from manydg.studies.study import Request, fewer_patients
from manydg.studies.summary import summarize_folder
from manydg.training.record import EpochEntry, RunRecord, Use

PAPER = (
    "objectives", "weights", "limited-data", "continual", "orthogonality", "domain-similarity", "norms",
    "decomposition", "runtime",
)  # fmt: skip
KINDS = ("classes", "votes", "binary", "multilabel")
QUICK = Options(TrainingConfig(epochs=2, batch_size=32, lr=5e-3, backbone_options={"hidden": 8, "width": 6}))


@pytest.fixture(scope="module")
def folders(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("data")
    return {kind: dataset_of(kind, patients=24, samples=6).save(place / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def studied(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All experiments on all kinds, in one results folder."""
    out, found = tmp_path_factory.mktemp("results"), {}
    for kind, place in folders.items():
        requests = {name: make_request(name, place, QUICK, 1, ("base", "manydg")) for name in PAPER}
        requests = {name: replace(request, timed_epochs=5) for name, request in requests.items()}
        compare(place, ("base", "manydg"), 1, out, options=QUICK)
        found[kind] = conduct(requests, place, out).records
    return out, found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PAPER)
def test_every_run_of_every_experiment_ends_well(studied: tuple[Path, dict[str, Any]], name: str, kind: str) -> None:
    records = studied[1][kind][name]
    assert records
    assert [record.error for record in records if record.status != "ok"] == []


def test_all_figures_are_as_the_report_wants_them(studied: tuple[Path, dict[str, Any]]) -> None:
    figures = read_figures(studied[0] / "figures")
    for kind in KINDS:
        drawn = {figure.experiment for figure in figures if figure.dataset == kind}
        wanted = {"objectives", "continual", "orthogonality", "domain-similarity", "norms", "embedding", "runtime"}
        assert wanted <= drawn


@pytest.mark.slow
def test_the_report_has_a_section_for_every_experiment_of_every_dataset(
    studied: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    page = write_report(studied[0], tmp_path / "report.html").read_text()
    for title in (
        "What each part of the method adds", "How much the weights of the objectives matter",
        "With fewer patients to learn from", "When new patients keep arriving", "Simpler ways to take the patient out",
        "How long training takes", "Do patient and label use different dimensions", "Does z tell patients apart",
        "How large the two parts are", "A map of what the model sees",
    ):  # fmt: skip
        assert page.count(f">{title}") >= len(KINDS), title


def test_a_run_that_serves_several_experiments_is_done_once_and_stands_in_all(
    studied: tuple[Path, dict[str, Any]],
) -> None:
    records = [record for record in read_results(studied[0]) if record.dataset == "classes"]
    assert len({record.run for record in records}) == len(records)
    (full,) = [
        record for record in records if record.algorithm == "manydg" and Use("compare")
        in record.experiments
    ]  # fmt: skip
    served = {use.experiment for use in full.experiments}
    assert served == {"compare", "objectives", "weights", "decomposition"}
    ones = [use.variant for use in full.experiments if use.experiment == "weights"]
    assert sorted(variant["changed"] for variant in ones) == ["mmd", "reconstruction", "similarity"]


def test_the_papers_ablations_start_from_weights_of_one_whatever_a_preset_has(folders: dict[str, Path]) -> None:
    options = replace(read_preset("iiic"), common=QUICK.common)
    request = make_request("objectives", folders["votes"], options, 1, ("manydg",))
    assert request.options.of("manydg").settings["mmd"] == 0.2
    weights = [[run.config.settings[name] for name in WEIGHTS] for run in Objectives().plan(request)]
    assert weights == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [1, 1, 1]]
    changed = [[run.config.settings[name] for name in WEIGHTS] for run in Weights().plan(request)]
    assert changed[:2] == [[0.1, 1, 1], [0.2, 1, 1]]
    assert changed[-1] == [0.2, 0.2, 2]


def test_every_experiment_has_all_its_rows_in_the_summary(studied: tuple[Path, dict[str, Any]]) -> None:
    summaries = {
        summary.experiment: summary for summary in summarize_folder(studied[0], resamples=20)
        if summary.dataset == "classes"
    }  # fmt: skip
    assert summaries["compare"].rows == ("base", "manydg")
    assert summaries["decomposition"].rows == ("base", "simd1", "simd2", "manydg")
    assert set(summaries["objectives"].rows) == {
        "manydg (case 1: supervised)",
        "manydg (case 2: supervised, MMD)",
        "manydg (case 3: supervised, reconstruction)",
        "manydg (case 4: supervised, MMD, reconstruction)",
        "manydg (all four objectives)",
    }
    assert len(summaries["weights"].rows) == 22
    assert "manydg (mmd, weight 0.1)" in summaries["weights"].rows
    assert "manydg (greedy combination: mmd 0.2, reconstruction 0.2, similarity 2)" in summaries["weights"].rows
    assert set(summaries["continual"].rows) == {
        f"{name} (replay {replay})" for name in ("base", "manydg") for replay in (4, 0)
    }


def test_a_term_that_is_off_has_a_learning_curve_and_no_part_in_training(
    studied: tuple[Path, dict[str, Any]],
) -> None:
    by_case = {record.variant["objectives"]: record for record in studied[1]["classes"]["objectives"]}
    for entry in by_case["case 1: supervised"].history:
        assert set(entry.losses) == {"supervised"}
        assert set(entry.val_terms) == {"supervised", "mmd", "reconstruction", "similarity"}
        assert -1 <= entry.val_terms["similarity"] <= 1
        assert -2 <= entry.val_terms["reconstruction"] <= 2
        assert entry.val_terms["mmd"] >= 0
    figures = {figure.title: figure for figure in read_figures(studied[0] / "figures") if figure.dataset == "classes"}
    similarity = figures["Agreement of domain factors, L_sim (best: -1)"].data
    assert isinstance(similarity, Curve)
    assert {line.name for line in similarity.series} == set(by_case)
    assert all(None not in line.mean for line in similarity.series)


def test_weights_vary_one_at_a_time(studied: tuple[Path, dict[str, Any]]) -> None:
    names = ("mmd", "reconstruction", "similarity")
    seen = {}
    for record in studied[1]["binary"]["weights"]:
        settings, variant = record.config.settings, record.variant
        if "weight" not in variant:
            assert [settings[name] for name in names] == [0.2, 0.2, 2.0]
            continue
        seen.setdefault(variant["changed"], []).append(settings[variant["changed"]])
        assert settings[variant["changed"]] == variant["weight"]
        assert all(settings[name] == 1.0 for name in names if name != variant["changed"])
    assert seen == {name: [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0] for name in names}


def test_limited_data_has_one_test_group_and_nested_training_groups(
    studied: tuple[Path, dict[str, Any]], folders: dict[str, Path], dataset_of: Callable[..., DomainDataset]
) -> None:
    records = studied[1]["votes"]["limited-data"]
    assert len({tuple(sorted(record.per_patient)) for record in records}) == 1
    sizes = {record.variant["training patients"] for record in records}
    assert all(record.patients.train == record.variant["training patients"] for record in records)
    data = dataset_of(patients=40)
    for seed in (0, 3):
        splits = [fewer_patients(data, TrainingConfig(seed=seed), count) for count in (5, 12, 32)]
        groups = [set(split.patients("train")) for split in splits]
        assert groups[0] < groups[1] < groups[2]
    tests = {tuple(fewer_patients(data, TrainingConfig(seed=seed), 5).patients("test")) for seed in range(3)}
    assert len(tests) == 1
    assert len(sizes) == 5


def test_each_experiment_scales_down_with_the_patients_and_says_so(
    folders: dict[str, Path], dataset_of: Callable[..., DomainDataset]
) -> None:
    small = Request(dataset_of(patients=24), QUICK, 1, ("base",))
    for name in ("limited-data", "continual"):
        assert "The paper" in EXPERIMENTS.get(name)().scaled(small)
    full = Request(dataset_of(patients=2800, samples=1), QUICK, 1, ("base",))
    for name in PAPER:
        assert EXPERIMENTS.get(name)().scaled(full) == ""
    sizes = [run.variant["training patients"] for run in EXPERIMENTS.get("limited-data")().plan(full)]
    assert sizes == [100, 500, 1000, 1500, 2000]


def test_running_times_come_from_23_epochs_one_run_at_a_time(dataset_of: Callable[..., DomainDataset]) -> None:
    experiment = EXPERIMENTS.get("runtime")()
    runs = experiment.plan(Request(dataset_of(), QUICK, 5, ("base", "boosting", "mldg")))
    assert [(run.config.algorithm, run.config.epochs) for run in runs] == [("base", 23), ("mldg", 23)]
    assert experiment.workers == 1
    seconds = [9.0, 9.0, 9.0, 1.0, 3.0]
    history = tuple(EpochEntry(epoch, {}, {}, value) for epoch, value in enumerate(seconds, start=1))
    config = TrainingConfig(algorithm="mldg")
    record = RunRecord(run="f0", algorithm="mldg", seed=0, dataset="d", config=config, device="cpu", history=history)
    request = Request(dataset_of(), QUICK, 1, ("mldg",))
    table = experiment.aggregate(request, [record], Path())["runtime"].data
    assert isinstance(table, CellTable)
    assert table.rows[0][:3] == ["MLDG (equivalent)", 2.0, pytest.approx(2**0.5)]


def test_a_failed_run_is_recorded_and_the_rest_is_folded(folders: dict[str, Path], tmp_path: Path) -> None:
    options = replace(QUICK, own={"base": {"lr": 1e30}})
    request = make_request("continual", folders["classes"], options, 1, ("base", "manydg"))
    records = conduct({"continual": request}, folders["classes"], tmp_path).records["continual"]
    assert {record.algorithm for record in records if record.status == "failed"} == {"base"}
    curves = [figure.data for figure in read_figures(tmp_path / "figures") if isinstance(figure.data, Curve)]
    assert {line.name for curve in curves for line in curve.series} == {"manydg"}
    assert write_report(tmp_path, tmp_path / "report.html").exists()


def test_an_experiment_of_which_every_run_fails_says_so_and_draws_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    said: list[str] = []
    compare(folders["classes"], ("manydg",), 1, tmp_path, options=QUICK)
    broken = replace(QUICK, own={"manydg": {"lr": 1e30}})
    request = make_request("objectives", folders["classes"], broken, 1, ())
    records = conduct({"objectives": request}, folders["classes"], tmp_path, report=said.append).records["objectives"]
    assert {record.status for record in records} == {"failed"}
    assert "no run ended well" in said[0]
    assert read_figures(tmp_path / "figures") == []


def test_algorithms_that_make_no_sense_are_left_out_with_the_reason(folders: dict[str, Path]) -> None:
    said: list[str] = []
    request = make_request("limited-data", folders["multilabel"], QUICK, 1, ("base", "pcl", "sagnet", "manydg"))
    assert fitting(request, said.append).algorithms == ("base", "manydg")
    assert [line.partition(" is left out: ")[0] for line in said] == ["pcl", "sagnet"]


def test_an_unknown_experiment_is_refused_with_the_nearest_name(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="did you mean 'objectives'"):
        make_request("objetives", folders["classes"], QUICK, 1, ("base",))


def test_patients_with_one_sample_each_have_nothing_within_and_no_step_on_a_single_row(
    dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    place = dataset_of("binary", patients=90, samples=1).save(tmp_path / "stays")
    names = ("continual", "domain-similarity", "orthogonality", "norms")
    requests = {name: make_request(name, place, QUICK, 1, ("base", "manydg")) for name in names}
    found = conduct(requests, place, tmp_path / "out").records
    assert {record.status for records in found.values() for record in records} == {"ok"}
    (similarity,) = [figure for figure in read_figures(tmp_path / "out" / "figures") if figure.kind == "similarity"]
    assert isinstance(similarity.data, Similarity)
    assert [row.within for row in similarity.data.rows] == [None, None]
    assert "None of the" in similarity.note
    assert write_report(tmp_path / "out", tmp_path / "report.html").exists()


def test_every_algorithm_can_learn_continually(folders: dict[str, Path], tmp_path: Path) -> None:
    data = folders["classes"]
    names = [name for name in ALGORITHMS.names() if name not in ("sagnet", "mixstyle")]
    request = make_request("continual", data, QUICK, 1, names)
    planned = {run.config.algorithm for run in EXPERIMENTS.get("continual")().plan(request)}
    assert planned == {name for name in names if ALGORITHMS.get(name).sampling != "whole"}
    chosen = replace(request, algorithms=("condadv", "dann", "irm", "pcl", "mldg"))
    records = conduct({"continual": chosen}, data, tmp_path).records["continual"]
    assert [record.error for record in records if record.status != "ok"] == []


def test_the_views_of_a_record_say_what_each_experiment_says() -> None:
    first = RunRecord(run="1", experiment="a", algorithm="base", seed=0, dataset="d", config=TrainingConfig())
    used = first.replace(experiments=(Use("a"), Use("b", {"x": 1})))
    found = views([used, first.replace(run="2", experiment="c")])
    assert [(view.run, view.experiment, view.variant) for view in found] == [
        ("1", "a", {}),
        ("1", "b", {"x": 1}),
        ("2", "c", {}),
    ]
    assert all("experiments" not in view.to_json() for view in found)
    for record in (*found, used, used.replace(status="failed", error="no luck")):
        written = json.loads(json.dumps(record.to_json()))
        wanted = {"target": {"kind": "binary", "names": ["a", "b"]}} if record.ok else {}
        assert RunRecord.from_json(written | wanted).to_json() == written | wanted


@pytest.mark.slow
def test_experiments_that_need_no_classes_run_on_a_number_and_the_others_say_why(
    dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    place = dataset_of("regression", patients=24, samples=6).save(tmp_path / "stays")
    names = ("compare", "objectives", "decomposition", "limited-data", "continual", "context", "domain-similarity")
    requests = {name: make_request(name, place, QUICK, 1, ("base", "manydg")) for name in names}
    records = conduct(requests, place, tmp_path / "out").records
    assert [record.error for name in names for record in records[name] if record.status != "ok"] == []
    page = write_report(tmp_path / "out", tmp_path / "report.html").read_text()
    assert page.count(">What each part of the method adds") >= 1
    with pytest.raises(ConfigError, match="for targets of the kind classes or votes or binary or multilabel"):
        make_request("orthogonality", place, QUICK, 1, ("base", "manydg"))
