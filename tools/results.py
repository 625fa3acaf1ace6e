"""All evidence of docs/results.md from one version of the code: prepare, run, collect, write.

    python -m tools.results run --data DIR [--work DIR] [--only NAME ...] [--workers N] [--device NAME]
    python -m tools.results collect [--work DIR]
    python -m tools.results write
    python -m tools.results version

``run`` prepares the datasets from raw files below ``--data`` and runs every study that is not done; it can be stopped
and started again. ``collect`` writes what the studies found to ``results/NAME.json``. ``write`` makes the tables of
docs/results.md and docs/results/ from these files; a test compares the pages with them. ``make results`` does all
three.

Evidence counts as of one version of the code while every algorithm in it predicts the same, bit for bit, on the data
of tests/reference with targets of its kind, and takes the same settings for the dataset. ``version`` notes what the
present code predicts, from the reference that the slow tests compare it with, in ``results/versions/``; a test compares
these notes with each other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from manydg.data.dataset import DomainDataset, open_dataset
from manydg.evaluation.probes import ROWS
from manydg.evaluation.statistics import PairedComparison, compare_paired, holm, wilcoxon_p
from manydg.files import code_version, write_json
from manydg.studies.figure_data import (
    FIGURES,
    CellTable,
    CosineTable,
    Curve,
    FigureData,
    Similarity,
    parse_figure,
    read_figures,
)
from manydg.studies.paper_figures import paper_table
from manydg.studies.records import read_results
from manydg.studies.summary import Summary, row_name, summarize_folder
from manydg.studies.summary_text import METRIC_NAMES
from manydg.targets import oriented
from manydg.training.record import RunRecord

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"
PAGES = (DOCS / "results.md", *sorted((DOCS / "results").glob("*.md")))
VERSIONS, REFERENCE = RESULTS / "versions", ROOT / "tests" / "reference" / "reference.json"
_COLUMNS_OF_A_CURVE = 7
PersonsMetrics = Mapping[str, Mapping[str, float | None]]

SLEEP = "--epochs 10 --batch-size 1024 --lr 1e-3 --backbone mlp"
SLEEP_SEQUENCE = "--sequence gru --context offline --seeds 5 --epochs 20 --batch-size 3200 --lr 2e-3 --backbone mlp"
KIDNEY = "--epochs 10 --batch-size 1024 --lr 1e-3 --backbone tabular"
KIDNEY_COLUMNS = (
    "--patient uniquepid --event onset --horizon 6h --session stay --time hour --time-unit h --site hospitalid "
    "--features 'value_*' 'measured_*' 'static_*' --missing keep --subgroup static_male --subgroup static_age:40,65,80"
)
LIGHTGBM = (
    "--set lightgbm.rounds=200 --set lightgbm.sample_share=0.5 --set lightgbm.learning_rate=0.05 "
    "--set lightgbm.leaves=16 --set lightgbm.leaf_samples=200 --set lightgbm.l2=10.0 --set lightgbm.feature_share=0.3"
)
EEG = "--epochs 12 --batch-size 64 --lr 5e-4 --backbone seizure-cnn"
DENSE = (
    "base,prototype,manydg-random-pairs,manydg,condadv,dann,irm,pcl,mldg,simd1,simd2,boosting,lightgbm,ema,swad,coral,"
    "vrex,groupdro,eqrm,arm,bn-adapt,erasure,tabm"
)
SIGNALS = (
    "base,prototype,manydg-random-pairs,manydg,condadv,dann,irm,sagnet,pcl,mldg,simd1,simd2,ema,swad,coral,vrex,groupdro,"
    "eqrm,arm,bn-adapt,mixstyle,erasure"
)
CONTROLS = "base,prototype,manydg-random-pairs,manydg"
TUNED = "base,prototype,manydg-random-pairs,manydg,dann,irm,pcl,simd2,ema,coral,vrex,groupdro"

TWINS = {
    "twin-iiic": (20, EEG),
    "twin-sleep": (5, "--epochs 12"),
    "twin-mimic3": (5, "--epochs 100 --weight-decay 1e-7"),
    "twin-eicu": (5, "--epochs 12"),
}
"""Splits of the main comparison, and options. A split of 10 seizure patients moves kappa by .05, hence more of them."""

DATASETS: dict[str, tuple[str, ...]] = {
    "sleep": (
        "manydg prepare table {data}/sleep_edf_78_features/epochs.parquet --patient subject_id --target stage "
        "--features 'EEG_*' --session night_id --time epoch_idx --classes W,N1,N2,N3,REM --out {work}/sleep",
    ),
    "kidney": (
        "python examples/kidney_table.py {data}/aki_hourly_eicu_demo {data}/eicu_demo {work}/kidney.parquet",
        f"manydg prepare table {{work}}/kidney.parquet --target label {KIDNEY_COLUMNS} --out {{work}}/kidney",
    ),
    "kidney-before": (
        "python examples/kidney_table.py {data}/aki_hourly_eicu_demo {data}/eicu_demo {work}/kidney.parquet",
        f"manydg prepare table {{work}}/kidney.parquet {KIDNEY_COLUMNS} --out {{work}}/kidney-before",
    ),
    "eegmat": ("manydg prepare edf {data}/eegmat_bids --window 10 --classes rest,arithmetic --out {work}/eegmat",),
    "twin-iiic": (
        "manydg synthesize iiic --patients 100 --samples-per-patient 20 --out {work}/raw-iiic",
        "manydg prepare iiic {work}/raw-iiic --out {work}/twin-iiic",
    ),
    "twin-sleep": (
        "manydg synthesize sleep-edf --patients 40 --nights 1 --hours 4 --out {work}/raw-sleep",
        "manydg prepare sleep-edf {work}/raw-sleep --out {work}/twin-sleep",
    ),
    "twin-mimic3": (
        "manydg synthesize mimic3 --patients 5000 --out {work}/raw-mimic3",
        "manydg prepare mimic3 {work}/raw-mimic3 --ndc-map {work}/raw-mimic3/ndc_to_atc.csv --out {work}/twin-mimic3",
    ),
    "twin-eicu": (
        "manydg synthesize eicu --patients 2000 --out {work}/raw-eicu",
        "manydg prepare eicu {work}/raw-eicu --out {work}/twin-eicu",
    ),
}
"""By name, the commands that prepare a dataset from raw files."""


@dataclass(frozen=True)
class StudyPlan:
    """One study: its block on the page, its dataset, and the command that runs it.

    A study that is tuned has the search before it, on the same dataset and with the same options; it says how many
    trials every algorithm gets on every split. With ``people``, every unseen person's own metrics are kept.
    """

    name: str
    dataset: str
    command: str
    reference: str = "base"
    trials: int = 0
    people: bool = False

    @property
    def source(self) -> str:
        """What its dataset is prepared from: a source may have settings of its own."""
        return shlex.split(DATASETS[self.dataset][-1])[2]

    @property
    def says_settings(self) -> bool:
        """Whether the settings of algorithms are the study's own."""
        return any(words in self.command for words in ("--set ", "experiment objectives", "experiment weights"))

    @property
    def splits(self) -> int:
        """How many patient splits its command asks for."""
        seeds, repeats = (re.search(rf"--{option} (\d+)", self.command) for option in ("seeds", "repeats"))
        return (int(seeds.group(1)) if seeds else 1) * (int(repeats.group(1)) if repeats else 1)

    @property
    def commands(self) -> tuple[str, ...]:
        """What is typed to run it."""
        out = f"--out {self.name}"
        if not self.trials:
            return (f"manydg {self.command} {out}",)
        search = self.command.replace("compare", "tune", 1)
        return (
            f"manydg {search} --trials {self.trials} --out {self.name}-search",
            f"manydg {self.command} --tuned {self.name}-search {out}",
        )


def of_the_claims(data: str, options: str) -> tuple[StudyPlan, ...]:
    """The paper's experiments beside its main comparison, on one dataset."""
    return (
        StudyPlan(f"{data}-objectives", data, f"experiment objectives {data} --seeds 5 {options}",
                  "manydg (all four objectives)"),
        StudyPlan(f"{data}-limited", data,
                  f"experiment limited-data {data} --algorithms base,manydg --seeds 5 {options}"),
        StudyPlan(f"{data}-continual", data,
                  f"experiment continual {data} --algorithms base,manydg --seeds 5 {options}"),
        StudyPlan(f"{data}-similarity", data, f"experiment domain-similarity {data} --seeds 5 {options}"),
        StudyPlan(f"{data}-orthogonality", data, f"experiment orthogonality {data} --seeds 5 {options}"),
    )  # fmt: skip


STUDIES = (
    StudyPlan("sleep-rivals", "sleep",
              f"experiment context-rivals sleep --algorithms {DENSE} --seeds 5 {SLEEP}", "base (no context)",
              people=True),
    StudyPlan("sleep-sequence", "sleep",
              f"compare sleep --algorithms base,ema,manydg {SLEEP_SEQUENCE}", people=True),
    StudyPlan("sleep-best", "sleep",
              f"compare sleep --algorithms best,ema {SLEEP_SEQUENCE}", "best"),
    StudyPlan("sleep-tuned", "sleep",
              f"compare sleep --algorithms {TUNED} --context offline --seeds 5 {SLEEP}", trials=12),
    *of_the_claims("sleep", SLEEP),
    StudyPlan("kidney-rivals", "kidney",
              f"experiment context-rivals kidney --context causal --algorithms {DENSE} --seeds 5 {KIDNEY}",
              "base (no context)"),
    StudyPlan("kidney-best", "kidney",
              "compare kidney --algorithms best,boosting,ema --context causal --seeds 5 --set boosting.rounds=50 "
              "--set boosting.learning_rate=0.05 --set boosting.leaves=16 --set boosting.leaf_samples=200 "
              f"--set boosting.l2=10.0 --set boosting.feature_share=0.3 {KIDNEY}", "best"),
    StudyPlan("kidney-tuned", "kidney",
              f"compare kidney --algorithms {TUNED},lightgbm,tabm --context causal --seeds 5 {KIDNEY}", trials=12),
    StudyPlan("kidney-before", "kidney-before",
              "experiment context-rivals kidney-before --context causal --algorithms base,manydg,ema,boosting,lightgbm "
              f"--seeds 5 {KIDNEY}", "base (no context)"),
    *of_the_claims("kidney", KIDNEY),
    StudyPlan("kidney-alarms", "kidney-before",
              "compare kidney-before --algorithms lightgbm,best,ema --context causal --seeds 5 --at alarms=1/day "
              f"{LIGHTGBM} {KIDNEY}", "lightgbm"),
    StudyPlan("kidney-sites", "kidney",
              f"compare kidney --algorithms best,lightgbm,ema --context causal --split site --seeds 5 --repeats 1 "
              f"{KIDNEY}", "best"),
    StudyPlan("eegmat-rivals", "eegmat",
              f"experiment context-rivals eegmat --algorithms {SIGNALS} --seeds 5 --repeats 2 {EEG}",
              "base (no context)"),
    StudyPlan("eegmat-best", "eegmat",
              f"compare eegmat --algorithms best,ema,manydg-context --context offline --seeds 5 --repeats 2 {EEG}",
              "best"),
    StudyPlan("eegmat-tuned", "eegmat",
              f"compare eegmat --algorithms {TUNED} --context offline --seeds 5 {EEG}", trials=12),
    StudyPlan("eegmat-objectives", "eegmat",
              f"experiment objectives eegmat --seeds 5 --repeats 2 {EEG}", "manydg (all four objectives)"),
    StudyPlan("eegmat-weights", "eegmat",
              f"experiment weights eegmat --seeds 5 {EEG}"),
    *of_the_claims("eegmat", EEG)[1:],
    StudyPlan("twin-iiic-weights", "twin-iiic",
              "compare twin-iiic --algorithms base,manydg --seeds 20 --set manydg.mmd=1 "
              f"--set manydg.reconstruction=1 --set manydg.similarity=1 {EEG}"),
    StudyPlan("sleep-labels", "sleep",
              f"experiment personalise sleep --algorithms base,manydg --seeds 5 {SLEEP}"),
    StudyPlan("kidney-labels", "kidney",
              "experiment personalise kidney --context causal --label-delay 24 --algorithms base,lightgbm,gpboost "
              f"--seeds 5 {KIDNEY}"),
    StudyPlan("eegmat-labels", "eegmat",
              f"experiment personalise eegmat --context offline --algorithms base,manydg --seeds 5 {EEG}"),
    *(plan for name, (splits, options) in TWINS.items() for plan in (
        StudyPlan(name, name, f"compare {name} --algorithms {CONTROLS} --seeds {splits} {options}"),
        *of_the_claims(name, options))),
)  # fmt: skip


# From raw files to results/NAME.json.


def run(data: Path, work: Path, only: Sequence[str], options: Sequence[str]) -> None:
    """Prepare what is missing and run every study; each goes on where it was stopped."""
    work.mkdir(parents=True, exist_ok=True)
    for plan in STUDIES:
        if only and plan.name not in only:
            continue
        if not (work / plan.dataset / "dataset.json").exists():
            for command in DATASETS[plan.dataset]:
                _call(shlex.split(command.format(data=data, work=work)), ROOT)
        for command in plan.commands:
            _call([*located(plan, command, work), *options], ROOT)


def located(plan: StudyPlan, command: str, work: Path) -> list[str]:
    """The words of a plan's command, with folders below ``work`` for names; a study may be called as its data."""
    studies = {plan.name: work / "studies" / plan.name, f"{plan.name}-search": work / "searches" / plan.name}
    data = {plan.dataset: work / plan.dataset}
    words = shlex.split(command)
    return [
        str((studies if before in ("--out", "--tuned") else data).get(word, word))
        for before, word in zip(["", *words], words, strict=False)
    ]


def _call(command: Sequence[str], folder: Path) -> None:
    program = [sys.executable, "-m", "manydg"] if command[0] == "manydg" else [sys.executable]
    print("$", shlex.join(command), flush=True)
    subprocess.run([*program, *command[1:]], cwd=folder, check=True)


def collect(work: Path) -> list[Path]:
    """Write what every finished study found to ``results/``."""
    written = []
    for plan in STUDIES:
        folder = work / "studies" / plan.name
        results = folder / "results.jsonl"
        if results.exists() and results.stat().st_size:
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"{plan.name}.json"
            write_json(path, evidence(plan, folder, work / plan.dataset))
            written.append(path)
    return written


def evidence(plan: StudyPlan, folder: Path, dataset: Path | None = None) -> dict[str, Any]:
    """What a study found, small enough to be committed.

    - ``dataset``: Its folder, where people's own metrics are kept: they are known by their position in the dataset.
    """
    records = [record for record in read_results(folder) if record.ok]
    summaries = summarize_folder(folder, plan.reference)
    figures = [figure for figure in read_figures(folder / FIGURES) if isinstance(figure.data, _SHOWN)]
    return {
        "study": plan.name,
        "commands": list(plan.commands),
        "code_version": sorted({record.code_version for record in records}),
        "dataset_hash": sorted({record.dataset_hash for record in records}),
        "runs": len(records),
        "devices": sorted({record.device for record in records}),
        "refused": _refused(folder),
        "summaries": [_summary_json(summary) for summary in summaries],
        "figures": [figure.to_json() for figure in figures],
        **({"people": _people(records, open_dataset(dataset))} if plan.people and dataset is not None else {}),
    }


def _people(records: Sequence[RunRecord], dataset: DomainDataset) -> dict[str, PersonsMetrics]:
    """Of each row and unseen person, by position in the dataset, the mean over splits of the person's own metrics."""
    position = {alias: str(code) for code, alias in enumerate(dataset.pseudonyms())}
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for record in records:
        row = values.setdefault(row_name(record), {})
        for alias, metrics in record.per_patient.items():
            own = row.setdefault(position[alias], {})
            for metric, value in metrics.items():
                if metric != "samples" and value is not None:
                    own.setdefault(metric, []).append(float(value))
    return {
        row: {
            person: {metric: _rounded(statistics.fmean(each)) for metric, each in own.items()}
            for person, own in sorted(people.items(), key=lambda item: int(item[0]))
        }
        for row, people in values.items()
    }


def _refused(folder: Path) -> dict[str, str]:
    """Rows that cannot be here, each with the reason that its runs gave."""
    records = read_results(folder)
    finished = {row_name(record) for record in records if record.ok}
    return {row_name(record): record.error or "" for record in records if row_name(record) not in finished}


def _summary_json(summary: Summary) -> dict[str, Any]:
    rows = {}
    for row in summary.rows:
        entries = {metric: summary.entries[row, metric] for metric in summary.metrics}
        if not any(entry.values for entry in entries.values()):
            continue
        rows[row] = {
            "seconds": _rounded(summary.seconds.get(row)),
            "test_share": _rounded(summary.test_shares[row]),
            "metrics": {
                metric: {
                    "values": {str(seed): _rounded(value) for seed, value in entry.values.items()},
                    "mean": _rounded(entry.mean),
                    "interval": _bounds(entry.interval),
                    # The page shows what a row gains; a summary has the reference minus the row.
                    "gain": _rounded(-entry.comparison.difference if entry.comparison else None),
                    "gain_interval": _bounds(entry.difference, negate=True),
                    "p": _rounded(entry.adjusted["corrected"] if entry.adjusted else None),
                }
                for metric, entry in entries.items()
            },
        }
    return {
        "experiment": summary.experiment,
        "synthetic": summary.synthetic,
        "metrics": list(summary.metrics),
        "primary": summary.primary,
        "reference": summary.reference,
        "seeds": list(summary.seeds),
        "patients": {"train": summary.patients.train, "val": summary.patients.val, "test": summary.patients.test},
        "tested_patients": summary.tested_patients,
        "rows": rows,
        "notes": list(summary.notes),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _bounds(interval: Any, *, negate: bool = False) -> list[float | None] | None:
    if interval is None or not math.isfinite(interval.low):
        return None
    bounds = (-interval.high, -interval.low) if negate else (interval.low, interval.high)
    return [_rounded(bound) for bound in bounds]


# From results/NAME.json to the pages.

_SHOWN = (Similarity, CosineTable, CellTable, Curve)
BEGIN, END = "<!-- result: {name} -->", "<!-- end of result -->"


def read_evidence() -> dict[str, dict[str, Any]]:
    """Every file of ``results/`` by the name of its study."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def page(text: str, found: dict[str, dict[str, Any]]) -> str:
    """A page with every block of results made anew; a block whose study was not run says so."""
    blocks = {plan.name: block(plan, found) for plan in STUDIES}
    blocks |= {"headline": headline(found), "claims": claims(found), "twin-claims": twin_claims(found)}
    blocks |= {"versions": versions(found)}
    blocks["sleep-in-order"] = in_order(found)

    def replaced(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"{BEGIN.format(name=name)}\n{blocks[name]}\n{END}"

    return re.sub(r"<!-- result: ([\w-]+) -->.*?" + re.escape(END), replaced, text, flags=re.DOTALL)


def block(plan: StudyPlan, found: dict[str, dict[str, Any]]) -> str:
    """One study: its command and its tables."""
    command = "\n".join(["```", *plan.commands, "```"])
    if plan.name not in found:
        return f"{command}\n\nNot run yet."
    summaries = found[plan.name]["summaries"]
    tables = [_summary_table(summary) for summary in summaries]
    shown = {summary["primary"] for summary in summaries}
    for figure in (parse_figure(figure) for figure in found[plan.name]["figures"]):
        if figure.experiment == "personalise":
            tables.append(_labels_tables(figure))
        elif figure.experiment != "continual" or not isinstance(figure.data, Curve) or figure.data.y.label in shown:
            tables.append(_figure_table(figure))
    refused = found[plan.name].get("refused", {})
    tables += [f"Cannot be used here: {row} ({reason})." for row, reason in refused.items()]
    unfinished = [text for summary in found[plan.name]["summaries"] for text in _unfinished(plan, summary)]
    unfinished = [text for text in unfinished if text not in refused]
    note = f"Not finished, so not in the table or with fewer splits: {', '.join(unfinished)}." if unfinished else ""
    return "\n\n".join([command, *filter(None, [*tables, note])])


def _unfinished(plan: StudyPlan, summary: dict[str, Any]) -> list[str]:
    """Rows of a study that have no run yet, or not one for every split."""
    rows = {name: row["metrics"][summary["primary"]]["values"] for name, row in summary["rows"].items()}
    asked = re.search(r"--algorithms ([\w,-]+)", plan.command)
    labels = dict.fromkeys(name.partition(" ")[2] for name in rows)
    planned = [f"{name} {label}".strip() for name in asked.group(1).split(",") for label in labels] if asked else []
    splits = len(summary["seeds"])
    fewer = [f"all ({splits} of {plan.splits} splits)"] if splits < plan.splits else []
    return (
        fewer
        + [name for name in planned if name not in rows]
        + [f"{name} ({len(values)} of {splits} splits)" for name, values in rows.items() if len(values) < splits]
    )


def _summary_table(summary: dict[str, Any]) -> str:
    reference, primary = summary["reference"], summary["primary"]
    shown = summary["metrics"]
    if any(metric.endswith("_before") for metric in shown):
        # Before and after an event's onset apart: a table that fits the page.
        shown = [metric for metric in shown if metric.startswith(primary) or metric == "auroc"]
    names = [METRIC_NAMES.get(metric, metric) for metric in shown]
    gain = [f"{METRIC_NAMES.get(primary, primary)} minus {reference}", "p"] if reference else []
    lines = _table_head(["", *names, *gain], ["---", *["---:"] * (len(names) + len(gain))])
    # The mean of fewer splits is of other patients.
    splits = len(summary["seeds"])
    whole = [row for row in summary["rows"].values() if len(row["metrics"][primary]["values"]) == splits]
    best = {metric: _best_mean(metric, whole) for metric in shown}
    for name, row in summary["rows"].items():
        cells = []
        for metric in shown:
            entry = row["metrics"][metric]
            mean = _number(entry["mean"])
            mean = f"**{mean}**" if row in whole and entry["mean"] == best[metric] else mean
            interval = _interval(entry["interval"]) if metric.startswith(primary) else ""
            cells.append(f"{mean} {interval}".strip())
        if reference:
            entry = row["metrics"][primary]
            cells += [f"{_number(entry['gain'], sign=True)} {_interval(entry['gain_interval'], sign=True)}".strip()]
            cells += ["" if entry["p"] is None else _p_value(entry["p"])]
        lines.append(_row([name, *cells]))
    patients = summary["patients"]
    kind = "synthetic " if summary["synthetic"] else ""
    about = (
        f"{len(summary['seeds'])} splits; {patients['train']} {kind}patients train, {patients['val']} validate and "
        f"{patients['test']} are unseen in the first; {summary['tested_patients']} were unseen in some split."
    )
    return "\n".join([*lines, "", about])


def _best_mean(metric: str, rows: Sequence[dict[str, Any]]) -> float | None:
    """The highest mean of some rows, or the lowest of an error; None where it is undefined for all."""
    means = (row["metrics"][metric]["mean"] for row in rows)
    return max((mean for mean in means if mean is not None), key=lambda mean: oriented(metric, mean), default=None)


def _figure_table(figure: FigureData) -> str:
    data = figure.data
    if isinstance(data, Similarity):
        lines = _table_head([figure.title, "of one patient", "of two patients"], ["---", "---:", "---:"])
        lines += [_row([row.name, _number(row.within, 5), _number(row.across, 5)]) for row in data.rows]
    elif isinstance(data, CosineTable):
        head = ["weights of two linear models", "cosine", "sd over splits", "mean absolute cosine", "the paper"]
        lines = _table_head(head, ["---", *["---:"] * 4])
        for row, printed in zip(data.rows, ROWS, strict=True):
            cells = [_number(number) for number in (row.cosine, row.sd, row.absolute)]
            lines.append(_row([f"{row.first}, {row.second}", *cells, _paper_cosine(printed)]))
        lines += ["", f"{figure.note} The paper's column is its average of four tasks."]
    elif isinstance(data, CellTable):
        lines = _table_head(list(data.columns), ["---"] * len(data.columns))
        lines += [_row([_number(cell) if isinstance(cell, float) else str(cell) for cell in row]) for row in data.rows]
    elif isinstance(data, Curve):
        step = max(1, math.ceil(len(data.x.values) / _COLUMNS_OF_A_CURVE))
        shown = range(0, len(data.x.values), step)
        label = METRIC_NAMES.get(data.y.label, data.y.label)
        head = [f"{figure.title}: {label}, by {data.x.label}", *(f"{data.x.values[at]:g}" for at in shown)]
        lines = _table_head(head, ["---", *["---:"] * len(shown)])
        lines += [_row([line.name, *(_number(line.mean[at]) for at in shown)]) for line in data.series]
    else:
        return ""
    return "\n".join(lines)


_DRAWS = {
    "first": "The first samples in time",
    "drawn": "Samples drawn at random",
    "spread": "Samples drawn evenly over the predicted classes",
}
_SHOWN_OF_A_METHOD = re.compile(r",? ?\(?(some labels of the patient|labels of earlier samples) known\)?")


def _labels_tables(figure: FigureData) -> str:
    """What labels of a new patient are worth: a table for each way of choosing them, and one of other protocols."""
    if not isinstance(figure.data, CellTable):
        return ""  # A curve of what the table has.
    rows: list[dict[str, Any]] = [dict(zip(figure.data.columns, row, strict=True)) for row in figure.data.rows]
    changes: dict[str, dict[tuple[str, str], dict[int, str]]] = {words: {} for words in _DRAWS.values()}
    alone: dict[tuple[str, str, str], list[str]] = {}
    others = _table_head(["Shown of the patient", "method", "learner", "without", "with", "change"],
                         ["---"] * 3 + ["---:"] * 3)  # fmt: skip
    for row in rows:
        method = _SHOWN_OF_A_METHOD.sub("", row["method"])
        method = method + ")" if "(" in method and ")" not in method else method
        change = _number(row["change"], sign=True)
        change = f"**{change}**" if row["p"] is not None and row["p"] < 0.05 else change
        if row["labels"]:
            words = next(words for name, words in _DRAWS.items() if f"_{name}_" in row["protocol"])
            changes[words].setdefault((method, row["learner"]), {})[row["labels"]] = change
            values = [_number(row["model alone"]), _number(row["no labels"])]
            alone.setdefault((words, method, row["learner"]), values)
        else:
            numbers = [_number(row["no labels"]), _number(row["shown"]), change]
            others.append(_row([row["shown of the patient"], method, row["learner"], *numbers]))
    tables: list[str] = []
    for words, methods in changes.items():
        counts = sorted({count for cells in methods.values() for count in cells})
        head = [words, "learner", "model alone", "0 labels", *map(str, counts)]
        lines = _table_head(head, ["---", "---", *["---:"] * (len(head) - 2)])
        for (method, learner), cells in methods.items():
            numbers = [*alone[words, method, learner], *(cells.get(count, "") for count in counts)]
            lines.append(_row([method, learner, *numbers]))
        tables.append("\n".join(lines))
    return "\n\n".join([*(table for table in tables if table.count("\n") > 1), "\n".join(others), figure.note])


_HEADLINE = (
    ("plain training", "rivals", "base (no context)"),
    ("ManyDG as published", "rivals", "manydg (no context)"),
    ("plain training, shown the patient's other samples", "rivals", "base ({} context)"),
    ("boosting, shown them", "best", "boosting"),
    ("an averaged network that reads them in order", "sequence", "ema"),
    ("`best`, which weighs all of these", "best", "best"),
)


def headline(found: dict[str, dict[str, Any]]) -> str:
    """What to expect on the next patient: a few rows of the tables of real patients."""
    columns, body = [""], [[name] for name, _, _ in _HEADLINE]
    planned = {plan.name: plan.splits for plan in STUDIES}
    for data, name in _REAL.items():
        rivals = found.get(f"{data}-rivals")
        primary = rivals["summaries"][0]["primary"] if rivals else ""
        columns.append(f"{name}: {METRIC_NAMES.get(primary, primary)}")
        for cells, (_, study, row) in zip(body, _HEADLINE, strict=True):
            summaries = found.get(f"{data}-{study}", {"summaries": []})["summaries"]
            rows = summaries[0]["rows"] if summaries else {}
            one = next((rows[key] for context in ("causal", "offline") if (key := row.format(context)) in rows), None)
            entry = one["metrics"][primary] if one else None
            cells.append(_expected(entry, planned[f"{data}-{study}"]) if entry else "")
    return "\n".join([*_table_head(columns, ["---", *["---:"] * len(_REAL)]), *map(_row, body)])


def _expected(entry: Mapping[str, Any], planned: int) -> str:
    """A row's mean and interval, with the number of its splits where more were planned: it is of other patients."""
    splits = f", {len(entry['values'])} splits" if len(entry["values"]) < planned else ""
    return f"{_number(entry['mean'])} {_interval(entry['interval'])}".strip() + splits


@dataclass(frozen=True)
class Claim:
    """What the paper claims, as one row of a study against another."""

    text: str
    first: str
    second: str
    study: str = "rivals"
    printed: tuple[str, str] | None = None
    """The paper's table and the row of it that ManyDG is compared with."""


_CLAIMS = (
    Claim("ManyDG beats Base on unseen patients", "manydg (no context)", "base (no context)",
          printed=("biosignals", "base")),
    Claim("ManyDG beats the simple decomposition SimD1", "manydg (no context)", "simd1 (no context)",
          printed=("biosignals-decomposition", "simd1")),
    Claim("ManyDG beats the simple decomposition SimD2", "manydg (no context)", "simd2 (no context)",
          printed=("biosignals-decomposition", "simd2")),
    Claim("the losses matter (ManyDG against its head alone)", "manydg (no context)", "prototype (no context)"),
    Claim("pairs of one patient matter (ManyDG against pairs of strangers)", "manydg (no context)",
          "manydg-random-pairs (no context)"),
    Claim("not in the paper: Base shown the patient's other unlabelled samples beats Base", "base ({} context)",
          "base (no context)"),
    Claim("with context and twelve trials of tuning each, ManyDG beats Base", "manydg", "base", "tuned"),
    Claim("not in the paper: `best` beats one averaged network, both with context", "best", "ema", "best"),
)  # fmt: skip
_OF_TWINS = (
    Claim("ManyDG beats Base", "manydg", "base", ""),
    Claim("the losses matter (ManyDG against its head alone)", "manydg", "prototype", ""),
    Claim("pairs of one patient matter (ManyDG against pairs of strangers)", "manydg", "manydg-random-pairs", ""),
)
_OF_BOTH = (
    Claim("all four objectives beat the supervised one alone", "manydg (all four objectives)",
          "manydg (case 1: supervised)", "objectives"),
    Claim("with the fewest training patients, ManyDG beats Base", "manydg (training patients {fewest})",
          "base (training patients {fewest})", "limited"),
    Claim("learning from groups of patients in turn, ManyDG beats Base", "manydg (replay 0)", "base (replay 0)",
          "continual"),
)  # fmt: skip
_REAL = {"sleep": "sleep, 78 people", "eegmat": "raw EEG, 36 people", "kidney": "kidney injury, 1,549 patients"}
_TWINS = {"twin-iiic": "seizure", "twin-sleep": "sleep", "twin-mimic3": "drugs", "twin-eicu": "readmission"}


def claims(found: dict[str, dict[str, Any]]) -> str:
    """The paper's claims, what it printed and what was found here; p is corrected for the claims of a study."""
    return _claims_table(found, _REAL, (*_CLAIMS, *_OF_BOTH))


def twin_claims(found: dict[str, dict[str, Any]]) -> str:
    """The paper's claims on the twins of its four tasks."""
    return _claims_table(found, _TWINS, (*_OF_TWINS, *_OF_BOTH))


def _claims_table(found: dict[str, dict[str, Any]], columns: dict[str, str], asked: Sequence[Claim]) -> str:
    cells = {data: dict.fromkeys(asked, "not run") for data in columns}
    for data in columns:
        for study in {claim.study for claim in asked}:
            some = [claim for claim in asked if claim.study == study]
            cells[data] |= dict(zip(some, _tested(found.get(f"{data}-{study}".strip("-")), some), strict=True))
    lines = _table_head(["claim", "the paper printed", *columns.values()], ["---"] * (len(columns) + 2))
    for claim in asked:
        lines.append(_row([claim.text, _printed(claim), *(cells[data][claim] for data in columns)]))
    similar = [_similarity(found, f"{data}-similarity") for data in columns]
    table = paper_table("domain-similarity")
    printed = [table.text(table.find(task="average", row=row)[0]) for row in ("within", "across")]
    lines.append(_row(["z differs between patients more than within them (cosine within, across)",
                       f"{', '.join(printed)} (average of four tasks)", *similar]))  # fmt: skip
    printed = [_paper_cosine(f"v labels, {part} labels") for part in ("orthogonal", "parallel")]
    lines.append(_row(["linear models read the label from v⊥z and the patient from v∥z (cosine of the label's weights "
                       "on v with those on v⊥z, v∥z; accuracy: label from v⊥z, v∥z; patient from v∥z, v⊥z)",
                       f"cosine {', '.join(printed)} (average of four tasks)",
                       *(_probes(found.get(f"{data}-orthogonality")) for data in columns)]))  # fmt: skip
    return "\n".join(lines)


def _probes(study: dict[str, Any] | None) -> str:
    if study is None:
        return "not run"
    rows: dict[str, Any] = {}
    cosines: dict[tuple[str, str], float | None] = {}
    for data in (parse_figure(figure).data for figure in study["figures"]):
        if isinstance(data, CellTable):
            rows |= {str(row[0]): row[1] for row in data.rows}
        elif isinstance(data, CosineTable):
            cosines |= {(row.first, row.second): row.cosine for row in data.rows}
    pairs = [("v → labels", f"{part} → labels") for part in ("v⊥z", "v∥z")]
    parts = [_number(cosines[pair]) for pair in pairs if pair in cosines]
    asked = ("v⊥z → labels", "v∥z → labels", "v∥z → patients", "v⊥z → patients")
    numbers = [_number(float(str(rows[name]))) for name in asked]
    cosine = f"cosine {', '.join(parts)}; " if parts else ""
    return f"{cosine}label {', '.join(numbers[:2])}; patient {', '.join(numbers[2:])}"


def _paper_cosine(row: str) -> str:
    table = paper_table("orthogonality")
    return table.text(table.find(task="average", row=row)[0])


def _printed(claim: Claim) -> str:
    if claim.printed is None:
        return ""
    table, other = paper_table(claim.printed[0]), claim.printed[1]
    gains = []
    for task in ("seizure", "sleep"):
        ours, theirs = (table.find(task=task, row=row, metric="kappa")[0].value for row in ("manydg", other))
        if ours is not None and theirs is not None:
            gains.append(f"{_number(ours - theirs, sign=True)} Kappa ({task})")
    return ", ".join(gains)


def _tested(study: dict[str, Any] | None, asked: Sequence[Claim]) -> list[str]:
    """For each claim, whether its first row beats its second beyond chance, and by how much."""
    if study is None:
        return ["not run"] * len(asked)
    summary = study["summaries"][0]
    primary, rows = summary["primary"], summary["rows"]
    name = METRIC_NAMES.get(primary, primary)
    context = "causal" if "base (causal context)" in rows else "offline"
    fewest = min((int(number) for row in rows for number in re.findall(r"training patients (\d+)", row)), default=0)
    tests: list[PairedComparison | None] = []
    half: list[float] = []
    for claim in asked:
        pair = [row.format(context, fewest=fewest) for row in (claim.first, claim.second)]
        if not set(pair) <= set(rows):
            tests.append(None)
            half.append(math.nan)
            continue
        one, two = (rows[row]["metrics"][primary]["values"] for row in pair)
        both = [(one[seed], two[seed]) for seed in one if one[seed] is not None and two.get(seed) is not None]
        ratio, gaps = _test_share(summary, pair[0]), [first - second for first, second in both]
        tests.append(compare_paired(gaps, [0.0] * len(gaps), ratio))
        half.append(_half_width(gaps, ratio))
    corrected = iter(holm([test.corrected_p for test in tests if test is not None]))
    planned = next((plan.splits for plan in STUDIES if plan.name == study.get("study")), 0)
    return [
        "not run" if test is None else _answer(test, next(corrected), name, width, planned)
        for test, width in zip(tests, half, strict=True)
    ]


def _test_share(summary: dict[str, Any], row: str) -> float:
    """Test patients over training patients of a row, the mean over its splits; evidence of before has the first's."""
    share = summary["rows"][row].get("test_share")
    return float(share or summary["patients"]["test"] / summary["patients"]["train"])


def _half_width(gaps: Sequence[float], ratio: float) -> float:
    """Half the 95% interval of a mean difference over splits that share patients, by the corrected resampled t-test.

    NaN for fewer than two splits.
    """
    if len(gaps) < 2:
        return math.nan
    error = statistics.stdev(gaps) * math.sqrt(1 / len(gaps) + ratio)
    return float(stats.t.ppf(0.975, len(gaps) - 1)) * error


def _answer(test: PairedComparison, p: float, metric: str, half: float, planned: int) -> str:
    if math.isnan(p):
        return test.note
    interval = _interval([test.difference - half, test.difference + half], sign=True)
    splits = f" ({test.pairs} of {planned} splits)" if test.pairs < planned else ""
    said = f"{_verdict(test.difference, p)}: {_number(test.difference, sign=True)} {interval} {metric}, p {_p_value(p)}"
    return said + splits


def _verdict(difference: float, p: float) -> str:
    if not p < 0.05:
        return "within chance"
    return "yes" if difference > 0 else "no, the reverse"


def in_order(found: dict[str, dict[str, Any]]) -> str:
    """The averaged network that reads nights in order against every row that reads epochs one by one."""
    if not {"sleep-sequence", "sleep-rivals"} <= set(found):
        return "Not run yet."
    rivals, people = found["sleep-rivals"]["summaries"][0], found["sleep-rivals"].get("people", {})
    one = found["sleep-sequence"]["summaries"][0]["rows"]["ema"]["metrics"]
    own = found["sleep-sequence"].get("people", {}).get("ema", {})
    ratio = _test_share(rivals, next(iter(rivals["rows"])))
    told = []
    for metric in ("kappa", "f1_macro"):
        tests: list[PairedComparison] = []
        spread: list[float] = []
        for row in rivals["rows"].values():
            other = row["metrics"][metric]["values"]
            gaps = [one[metric]["values"][seed] - other[seed] for seed in other]
            tests.append(compare_paired(gaps, [0.0] * len(gaps), ratio))
            spread.append(statistics.stdev(gaps))
        corrected, ahead = holm([test.corrected_p for test in tests]), [test.difference for test in tests]
        splits = tests[0].pairs
        needed = float(stats.t.ppf(1 - 0.025 / len(tests), splits - 1)) * math.sqrt(1 / splits + ratio)
        told.append(
            f"{METRIC_NAMES.get(metric, metric)}: ahead of each by {_number(min(ahead))} to {_number(max(ahead))}, "
            f"beyond chance of {sum(p < 0.05 for p in corrected)} (largest p {max(corrected):.3f}). To be beyond it "
            f"of the first of {len(tests)}, {splits} splits take a difference of "
            f"{_number(needed * statistics.median(spread))} at the median spread of these differences."
        )
        if own and people:
            each = holm([wilcoxon_p(_own_gaps(own, people[row], metric)) for row in rivals["rows"]])
            told[-1] += (
                f" Over {len(own)} people who were unseen in some split, each with the person's own metric "
                f"(Wilcoxon): beyond chance of {sum(p < 0.05 for p in each)} (largest p {max(each):.3f})."
            )
    head = f"`ema` of this table against all {len(rivals['rows'])} rows of the table above, corrected by Holm."
    return "\n".join([head, "", *(f"- {line}" for line in told)])


def _own_gaps(one: PersonsMetrics, other: PersonsMetrics, metric: str) -> list[float]:
    """What people gain in their own metric, of those who have it in both."""
    pairs = [(values.get(metric), other.get(person, {}).get(metric)) for person, values in one.items()]
    return [first - second for first, second in pairs if first is not None and second is not None]


def _similarity(found: dict[str, dict[str, Any]], study: str) -> str:
    if study not in found:
        return "not run"
    for figure in found[study]["figures"]:
        data = parse_figure(figure).data
        if isinstance(data, Similarity):
            row = data.rows[-1]
            return f"{_number(row.within, 4)}, {_number(row.across, 4)} ({row.name})"
    return "not run"


def versions(found: dict[str, dict[str, Any]]) -> str:
    """Which code made the results, and on what machines."""
    codes = sorted({code for study in found.values() for code in study["code_version"]})
    devices = sorted({device for study in found.values() for device in study["devices"]})
    runs = sum(study["runs"] for study in found.values())
    if not found:
        return "Nothing was run yet."
    same = " Every algorithm in them predicts the same in all these versions (`results/versions`)."
    return f"{runs:,} runs of version {', '.join(codes)} on {', '.join(devices)}.{same if len(codes) > 1 else ''}"


def predicted(reference: dict[str, Any]) -> dict[str, str]:
    """What evidence depends on, each as a hash.

    For each algorithm and kind of target what it predicts on the data of the reference, once trained; for each source
    and algorithm the settings that training takes by itself.
    """
    kept: dict[str, list[str]] = {}
    for key, value in sorted(reference.items()):
        part, _, rest = key.partition(".")
        if part == "algorithm" and key.endswith(".predictions.float_hash"):
            kept.setdefault(".".join(rest.split(".")[:2]), []).append(f"{key}={value}")
        elif part == "backbone" and key.endswith(".config"):
            _, source, algorithm, _ = rest.split(".")
            config = json.loads(value)
            chosen = json.dumps([config[name] for name in ("settings", "lr", "weight_decay")], sort_keys=True)
            kept.setdefault(f"settings.{source}.{algorithm}", []).append(f"{key}={chosen}")
    return {name: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for name, lines in kept.items()}


def note_version() -> Path:
    """Note what the present code predicts, as the committed reference has it."""
    VERSIONS.mkdir(exist_ok=True)
    path = VERSIONS / f"{code_version()}.json"
    write_json(path, predicted(json.loads(REFERENCE.read_text(encoding="utf-8"))))
    return path


def _table_head(cells: Sequence[str], rule: Sequence[str]) -> list[str]:
    return [_row(cells), _row(rule)]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def _p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.0005 else "< 0.001"


def _interval(bounds: Sequence[float] | None, *, sign: bool = False) -> str:
    return "" if bounds is None else f"[{', '.join(_number(bound, sign=sign) for bound in bounds)}]"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.results", description=__doc__.splitlines()[0])
    parser.add_argument(
        "step",
        choices=["run", "collect", "write", "all", "version"],
        help="'all' is run, collect and write; 'version' notes what this code predicts on the reference",
    )
    parser.add_argument("--data", type=Path, help="folder of raw data, as docs/results.md describes it")
    parser.add_argument("--work", type=Path, default=ROOT / "results-work", help="for datasets and studies")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=[plan.name for plan in STUDIES],
        metavar="STUDY",
        help="these studies, by their names in this file",
    )
    parser.add_argument("--workers", type=int, default=2, help="how many runs at a time")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    chosen = parser.parse_args()
    if chosen.step in ("run", "all"):
        if chosen.data is None:
            parser.error("--data names the folder of raw data: make results DATA=DIR")
        options = ["--workers", str(chosen.workers), "--device", chosen.device]
        run(chosen.data.resolve(), chosen.work.resolve(), chosen.only, options)
    if chosen.step in ("collect", "all"):
        for path in collect(chosen.work):
            print("wrote", path.relative_to(ROOT))
    if chosen.step == "version":
        print("wrote", note_version().relative_to(ROOT))
    if chosen.step in ("write", "all"):
        for path in PAGES:
            path.write_text(page(path.read_text(encoding="utf-8"), read_evidence()), encoding="utf-8")


if __name__ == "__main__":
    main()
