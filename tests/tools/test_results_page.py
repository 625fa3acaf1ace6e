"""docs/results.md says what the records in results/ say, all of one version of the code."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.results import (
    DATASETS,
    PAGES,
    REFERENCE,
    STUDIES,
    VERSIONS,
    StudyPlan,
    block,
    claims,
    evidence,
    headline,
    in_order,
    located,
    page,
    predicted,
    read_evidence,
    twin_claims,
)

from manydg.config import TrainingConfig
from manydg.data.dataset import open_dataset
from manydg.data.info import DatasetInfo, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.evaluation.statistics import compare_paired, holm
from manydg.studies.catalogue.personalisation import COLUMNS
from manydg.studies.conduct import compare
from manydg.studies.figure_data import Axis, CellTable, CosineRow, CosineTable, Curve, FigureData, Line, XAxis
from manydg.studies.records import read_results

found = read_evidence()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_what_the_records_make_of_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert page(text, found) == text, "run python -m tools.results write"


def test_all_evidence_is_of_one_version_of_the_code_and_one_of_each_dataset() -> None:
    now = predicted(json.loads(REFERENCE.read_text(encoding="utf-8")))
    plans = {plan.name: plan for plan in STUDIES}
    assert {"settings.iiic.manydg", "settings.table.base"} <= set(now)
    for name, study in found.items():
        assert len(study["dataset_hash"]) == 1
        algorithms = {row.partition(" ")[0] for summary in study["summaries"] for row in summary["rows"]}
        several = any("jaccard" in summary["metrics"] for summary in study["summaries"])
        asked = [key for key in now if key.split(".")[0] in algorithms and key.endswith("multilabel") == several]
        assert {key.split(".")[0] for key in asked} == algorithms
        if not plans[name].says_settings:
            asked += [key for one in algorithms if (key := f"settings.{plans[name].source}.{one}") in now]
        for code in study["code_version"]:
            then = json.loads((VERSIONS / f"{code}.json").read_text(encoding="utf-8"))
            changed = [key for key in asked if then.get(key) != now[key]]
            assert not changed, f"{name} is of version {code}; {changed} are otherwise now: run it anew"


def test_a_version_is_another_one_for_an_algorithm_that_predicts_otherwise() -> None:
    reference = {
        "algorithm.base.binary.predictions.float_hash": "a", "algorithm.base.votes.predictions.float_hash": "b",
        "algorithm.irm.binary.predictions.float_hash": "c", "algorithm.irm.binary.seconds": 3,
        "study.x.float_hash": "d",
    }  # fmt: skip
    before = predicted(reference)
    assert set(before) == {"base.binary", "base.votes", "irm.binary"}
    assert predicted({**reference, "algorithm.irm.binary.seconds": 4, "study.x.float_hash": "e"}) == before
    for kind in ("binary", "votes"):
        after = predicted({**reference, f"algorithm.base.{kind}.predictions.float_hash": "x"})
        assert [key for key in before if after[key] != before[key]] == [f"base.{kind}"]


def test_a_version_is_another_one_where_a_source_has_other_settings() -> None:
    def reference(**changed: object) -> dict[str, str]:
        config = {"settings": {"mmd": 1.0}, "lr": 0.001, "weight_decay": 0.0, "epochs": 1} | changed
        same = {"settings": {}, "lr": 0.001, "weight_decay": 0.0}
        configs = {"manydg": config, "base": same}
        return {f"backbone.cnn.iiic.{name}.config": json.dumps(one) for name, one in configs.items()}

    before = predicted(reference())
    assert set(before) == {"settings.iiic.manydg", "settings.iiic.base"}
    assert predicted(reference(epochs=2)) == before
    for changed in ({"settings": {"mmd": 0.2}}, {"lr": 0.002}, {"weight_decay": 0.1}):
        after = predicted(reference(**changed))
        assert [key for key in before if after[key] != before[key]] == ["settings.iiic.manydg"]
    assert StudyPlan("a", "twin-iiic", "compare twin-iiic --algorithms manydg").source == "iiic"
    assert StudyPlan("a", "twin-iiic", "experiment objectives twin-iiic").says_settings
    assert StudyPlan("a", "twin-iiic", "compare twin-iiic --set manydg.mmd=1").says_settings
    assert not StudyPlan("a", "twin-iiic", "experiment limited-data twin-iiic").says_settings


def test_the_worth_of_labels_is_a_row_of_counts_with_its_test_and_the_verdict_below() -> None:
    def entry(protocol: str, labels: int | None, learner: str, change: float, p: float | None) -> list[Any]:
        method = "base (causal context, some labels of the patient known)"
        return [method, protocol, "words", labels, learner, 0.7, 0.75, 0.75 + change, change, change - 0.01, 0.2, p]

    rows = [
        entry("train_and_target_labeled_drawn_1", 1, "markov", 0.001, None),
        entry("train_and_target_labeled_drawn_20", 20, "markov", 0.031, 0.012),
        entry("train_and_target_labeled_earlier", None, "markov", 0.1, 0.003),
    ]
    note = "Worse than without labels beyond chance (interval below 0): in none of 3 rows."
    figures = [FigureData("Labels", CellTable(list(COLUMNS), rows), "personalise", note=note).to_json()]
    plan = next(plan for plan in STUDIES if plan.name == "sleep-labels")
    text = block(plan, {"sleep-labels": {"summaries": [], "figures": figures}})
    assert "| Samples drawn at random | learner | model alone | 0 labels | 1 | 20 |" in text
    assert "| base (causal context) | markov | 0.700 | 0.750 | +0.001 | **+0.031** |" in text
    assert "| words | base (causal context) | markov | 0.750 | 0.850 | **+0.100** |" in text
    assert "The first samples" not in text
    assert text.endswith(note)


def test_a_row_that_was_refused_has_its_reason_and_is_not_called_unfinished(made_up: dict[str, dict[str, Any]]) -> None:
    made_up["sleep-rivals"]["refused"] = {"arm (no context)": "it needs more"}
    text = block(STUDIES[0], made_up)
    assert "Cannot be used here: arm (no context) (it needs more)." in text
    assert "arm (no context)" not in text.splitlines()[-1]


def test_the_records_are_of_the_commands_on_the_page() -> None:
    plans = {plan.name: plan for plan in STUDIES}
    for name, study in found.items():
        assert study["commands"] == list(plans[name].commands)


def test_a_tuned_study_searches_first_with_the_same_algorithms_and_splits() -> None:
    plan = next(plan for plan in STUDIES if plan.trials)
    search, comparison = plan.commands
    assert search.startswith(f"manydg tune {plan.dataset} ")
    assert f"--trials {plan.trials} --out {plan.name}-search" in search
    assert f"--tuned {plan.name}-search --out {plan.name}" in comparison
    for option in ("--algorithms", "--seeds", "--epochs"):
        values = [re.search(rf"{option} (\S+)", command) for command in plan.commands]
        assert all(values)
        assert len({value.group(1) for value in values if value}) == 1


def test_a_study_with_the_name_of_its_data_is_written_elsewhere() -> None:
    plan = StudyPlan("twin", "twin", "compare twin --algorithms base", trials=2)
    search, compare = (located(plan, command, Path("work")) for command in plan.commands)
    assert search[2] == compare[2] == str(Path("work/twin"))
    assert search[-1] == compare[compare.index("--tuned") + 1] == str(Path("work/searches/twin"))
    assert compare[-1] == str(Path("work/studies/twin"))


def test_every_study_has_its_block_on_the_page_and_its_dataset_a_recipe() -> None:
    blocks = re.findall(r"<!-- result: ([\w-]+) -->", "".join(path.read_text(encoding="utf-8") for path in PAGES))
    others = ["headline", "claims", "twin-claims", "sleep-in-order", "versions"]
    assert sorted(blocks) == sorted([*(plan.name for plan in STUDIES), *others])
    assert {plan.dataset for plan in STUDIES} <= set(DATASETS)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_outside_the_blocks_no_result_is_typed(path: Path) -> None:
    text = re.sub(r"<!-- result: .*?<!-- end of result -->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"(?<![\w.])0?\.\d{2,}", text) == []


@pytest.fixture
def made_up() -> dict[str, dict[str, Any]]:
    def entry(mean: float, gain: float | None, p: float | None) -> dict[str, Any]:
        bounds = None if gain is None else [gain - 0.01, gain + 0.01]
        values = {"0": mean, "1": mean + 0.02}
        return {"values": values, "mean": mean, "interval": [mean - 0.05, mean + 0.05], "gain": gain,
                "gain_interval": bounds, "p": p}  # fmt: skip

    rows = {
        "base (no context)": entry(0.70, None, None),
        "prototype (no context)": entry(0.71, 0.01, 0.5),
        "manydg-random-pairs (no context)": entry(0.74, 0.04, 0.2),
        "manydg (no context)": entry(0.66, -0.04, 0.01),
        "base (offline context)": entry(0.81, 0.11, 0.001),
    }
    summary = {
        "metrics": ["kappa"], "primary": "kappa", "reference": "base (no context)", "seeds": [0, 1], "synthetic": False,
        "patients": {"train": 62, "val": 8, "test": 8}, "tested_patients": 15,
        "rows": {name: {"seconds": 1.0, "metrics": {"kappa": row}} for name, row in rows.items()},
    }  # fmt: skip
    return {"sleep-rivals": {"summaries": [summary], "figures": []}}


def test_claims_are_tested_over_the_splits_and_corrected_for_their_number(made_up: dict[str, dict[str, Any]]) -> None:
    rows = made_up["sleep-rivals"]["summaries"][0]["rows"]
    gains = {"base (no context)": (0.0, 0.0, 0.0), "manydg (no context)": (-0.051, -0.05, -0.049),
             "prototype (no context)": (-0.05, -0.051, -0.049), "manydg-random-pairs (no context)": (0.1, -0.3, 0.2),
             "base (offline context)": (0.1, 0.11, 0.12)}  # fmt: skip
    for row, values in gains.items():
        rows[row]["metrics"]["kappa"]["values"] = {str(at): 0.7 + value for at, value in enumerate(values)}
    lines = claims(made_up).splitlines()[2:]
    ratio = 8 / 62
    alone = compare_paired(gains["base (offline context)"], gains["base (no context)"], ratio).corrected_p
    # The interval of the corrected test: t(0.975, 2) = 4.3027 standard errors, sqrt(1/3 + 8/62) times the spread 0.01.
    half = 4.302653 * 0.01 * math.sqrt(1 / 3 + ratio)
    interval = f"[+{0.11 - half:.3f}, +{0.11 + half:.3f}]"
    assert f"yes: +0.110 {interval} Kappa, p {3 * alone:.3f} | not run | not run |" in lines[5]
    assert "| +0.031 Kappa (seizure), +0.014 Kappa (sleep) | no, the reverse: -0.050 [" in lines[0]
    assert "within chance: +0.000 [" in lines[3]
    assert "splits)" not in lines[3]
    planned = {"sleep-rivals": made_up["sleep-rivals"] | {"study": "sleep-rivals"}}
    assert "(3 of 5 splits)" in claims(planned).splitlines()[5]
    assert "within chance: -0.050 [" in lines[4]
    assert "| 0.9768 ± 0.0144, 0.9689 ± 0.0169 (average of four tasks) | not run |" in lines[11]
    assert "\n".join(lines).count("not run") == 35


def test_claims_are_tested_with_the_share_of_test_patients_of_their_rows(made_up: dict[str, dict[str, Any]]) -> None:
    """Groups of 36 people have 7 or 8: the first split's share is not that of all."""
    rows = made_up["sleep-rivals"]["summaries"][0]["rows"]
    gains = (0.10, 0.12, 0.14)
    for row, shift in (("base (no context)", 0.0), ("base (offline context)", 1.0)):
        rows[row]["metrics"]["kappa"]["values"] = {str(at): 0.7 + shift * gain for at, gain in enumerate(gains)}
    rows["base (offline context)"]["test_share"] = 0.5
    for row in ("manydg (no context)", "prototype (no context)", "manydg-random-pairs (no context)"):
        del rows[row]
    p = compare_paired(gains, [0.0] * 3, 0.5).corrected_p
    assert f"Kappa, p {p:.3f} |" in claims(made_up).splitlines()[7]


def test_a_split_without_a_value_or_a_single_split_makes_no_claim(made_up: dict[str, dict[str, Any]]) -> None:
    rows = made_up["sleep-rivals"]["summaries"][0]["rows"]
    rows["manydg (no context)"]["metrics"]["kappa"]["values"] = {"0": None, "1": 0.8}
    assert "| no test: fewer than two seeds |" in claims(made_up).splitlines()[2]


def test_of_an_error_the_lowest_mean_is_marked(made_up: dict[str, dict[str, Any]]) -> None:
    summary = made_up["sleep-rivals"]["summaries"][0]
    summary |= {"metrics": ["mae"], "primary": "mae"}
    for row in summary["rows"].values():
        row["metrics"]["mae"] = row["metrics"].pop("kappa")
    plan = StudyPlan("sleep-rivals", "sleep", "compare sleep")
    assert "| manydg (no context) | **0.660** " in block(plan, made_up)


def test_what_linear_models_read_from_the_parts_of_v_is_among_the_claims() -> None:
    accuracies = {"v∥z → labels": 0.2, "v⊥z → labels": 0.8, "v∥z → patients": 0.6, "v⊥z → patients": 0.4}
    table = CellTable(["linear model", "accuracy"], [[name, value] for name, value in accuracies.items()])
    cosines = [CosineRow("v → labels", f"{part} → labels", value) for part, value in (("v∥z", 0.1), ("v⊥z", 0.7))]
    figures = [FigureData("Cosines", CosineTable(cosines)), FigureData("Probes", table, "orthogonality")]
    studies = {"eegmat-orthogonality": {"summaries": [], "figures": [figure.to_json() for figure in figures]}}
    line = claims(studies).splitlines()[-1]
    assert "0.6845 ± 0.1729, 0.0785 ± 0.0229" in line
    assert "| not run | cosine 0.700, 0.100; label 0.800, 0.200; patient 0.600, 0.400 | not run |" in line


def test_claims_on_twins_compare_rows_of_their_own_studies(made_up: dict[str, dict[str, Any]]) -> None:
    summary = made_up["sleep-rivals"]["summaries"][0]
    values = {"base": (0.7, 0.71, 0.72), "manydg": (0.8, 0.811, 0.819), "prototype": (0.9, 0.91, 0.92)}
    summary["rows"] = {
        row: {"metrics": {"kappa": {"values": {str(at): value for at, value in enumerate(given)}}}}
        for row, given in values.items()
    }
    beats, losses, pairs, objectives = twin_claims({"twin-sleep": {"summaries": [summary]}}).splitlines()[2:6]
    assert beats.startswith("| ManyDG beats Base |  | not run | yes: +0.100 ")
    assert "no, the reverse: -0.100 " in losses
    assert pairs.count("not run") == objectives.count("not run") == 4


def test_nights_in_order_are_tested_against_every_row_over_splits_and_over_people(
    made_up: dict[str, dict[str, Any]],
) -> None:
    rivals = made_up["sleep-rivals"]
    rows = rivals["summaries"][0]["rows"]
    for at, row in enumerate(rows.values()):
        values = {str(seed): 0.7 + 0.01 * at + 0.002 * seed * at for seed in range(5)}
        row["metrics"] = {metric: {"values": values} for metric in ("kappa", "f1_macro")}
    ours = {metric: {"values": {str(seed): 0.75 for seed in range(5)}} for metric in ("kappa", "f1_macro")}
    found = {**made_up, "sleep-sequence": {"summaries": [{"rows": {"ema": {"metrics": ours}}}]}}
    gaps = [[0.05 - 0.01 * at - 0.002 * seed * at for seed in range(5)] for at in range(5)]
    p = holm([compare_paired(each, [0.0] * 5, 8 / 62).corrected_p for each in gaps])
    head, _, kappa, f1 = in_order(found).splitlines()
    assert "all 5 rows" in head
    assert kappa.startswith("- Kappa: ahead of each by -0.006 to 0.050, beyond chance of ")
    assert f"beyond chance of {sum(each < 0.05 for each in p)} (largest p {max(p):.3f})" in kappa
    assert "people" not in f1

    found["sleep-sequence"]["people"] = {"ema": {str(person): {"f1_macro": 0.8} for person in range(12)}}
    rivals["people"] = {row: {str(person): {"f1_macro": 0.7 + 0.001 * person} for person in range(11)} for row in rows}
    for values in (found["sleep-sequence"]["people"], rivals["people"]):
        for row in values.values():
            row |= {person: {**metrics, "kappa": 0.5} for person, metrics in row.items()}
    f1 = in_order(found).splitlines()[-1]
    # Eleven people that both have, all better: two in 2 ** 11, five times.
    assert "Over 12 people who were unseen in some split" in f1
    assert f"beyond chance of 5 (largest p {5 * 2 / 2**11:.3f})" in f1


def test_peoples_own_metrics_are_kept_by_their_position_in_the_dataset(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = np.arange(120)
    with DatasetWriter(tmp_path / "data", TargetSpec("binary", ("no", "yes")), DatasetInfo()) as writer:
        writer.append(
            {"x": rng.normal(size=(120, 3)).astype(np.float32)}, rows % 2, [f"p{at // 10:02d}" for at in rows]
        )
    compare(tmp_path / "data", ["base"], 2, tmp_path / "study", options=TrainingConfig(epochs=1), device="cpu")
    plan = StudyPlan("study", "data", "compare data --algorithms base", people=True)
    people = evidence(plan, tmp_path / "study", tmp_path / "data")["people"]["base"]
    records = [record for record in read_results(tmp_path / "study") if record.ok]
    names = open_dataset(tmp_path / "data").pseudonyms()
    own = {str(code): [record.per_patient[alias]["f1"] for record in records if alias in record.per_patient]
           for code, alias in enumerate(names)}  # fmt: skip
    assert {person: metrics["f1"] for person, metrics in people.items()} == {
        person: pytest.approx(sum(values) / len(values), rel=1e-5) for person, values in own.items() if values
    }
    assert "people" not in evidence(replace(plan, people=False), tmp_path / "study", tmp_path / "data")


def test_what_to_expect_is_of_the_tables_below(made_up: dict[str, dict[str, Any]]) -> None:
    lines = headline(made_up).splitlines()
    assert lines[0] == "|  | sleep, 78 people: Kappa | raw EEG, 36 people:  | kidney injury, 1,549 patients:  |"
    # Two of the five planned splits were run: their mean is of other patients than that of all.
    assert "| plain training | 0.700 [0.650, 0.750], 2 splits |  |  |" in lines
    assert "| plain training, shown the patient's other samples | 0.810 [0.760, 0.860], 2 splits |  |  |" in lines
    row = made_up["sleep-rivals"]["summaries"][0]["rows"]["base (no context)"]["metrics"]["kappa"]
    row["values"] = dict.fromkeys("01234", 0.7)
    assert "| plain training | 0.700 [0.650, 0.750] |  |  |" in headline(made_up).splitlines()


def test_of_continual_learning_the_main_metric_is_shown_by_step_under_its_title(
    made_up: dict[str, dict[str, Any]],
) -> None:
    curves = {
        metric: Curve(XAxis("patients seen", [10, 20]), Axis(metric), [Line("base", [value, 0.5])])
        for metric, value in (("kappa", 0.25), ("accuracy", 0.75))
    }
    figures = [FigureData("Without replay", curve, "continual").to_json() for curve in curves.values()]
    text = block(STUDIES[0], {"sleep-rivals": {**made_up["sleep-rivals"], "figures": figures}})
    assert "| Without replay: Kappa, by patients seen | 10 | 20 |" in text
    assert "| base | 0.250 | 0.500 |" in text
    assert "0.750" not in text.partition("Without replay")[2]


def test_a_table_marks_the_best_and_shows_what_each_row_gains(made_up: dict[str, dict[str, Any]]) -> None:
    text = block(STUDIES[0], made_up)
    assert "| base (offline context) | **0.810** [0.760, 0.860] | +0.110 [+0.100, +0.120] | 0.001 |" in text
    assert "62 patients train, 8 validate and 8 are unseen in the first; 15 were unseen in some split" in text
    assert "Not run yet" in block(STUDIES[1], made_up)


def test_the_mean_of_fewer_splits_is_never_the_best(made_up: dict[str, dict[str, Any]]) -> None:
    rows = made_up["sleep-rivals"]["summaries"][0]["rows"]
    del rows["base (offline context)"]["metrics"]["kappa"]["values"]["1"]
    text = block(STUDIES[0], made_up)
    assert "| base (offline context) | 0.810 [" in text
    assert "| manydg-random-pairs (no context) | **0.740** [" in text


def test_what_is_not_finished_is_named(made_up: dict[str, dict[str, Any]]) -> None:
    rows = made_up["sleep-rivals"]["summaries"][0]["rows"]
    del rows["manydg (no context)"]["metrics"]["kappa"]["values"]["1"]
    note = block(STUDIES[0], made_up).splitlines()[-1]
    assert note.startswith(
        "Not finished, so not in the table or with fewer splits: all (2 of 5 splits), prototype (offline context), "
    )
    assert "base (offline context)" not in note
    assert note.endswith("manydg (no context) (1 of 2 splits).")
