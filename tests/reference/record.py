"""Records what the program computes on small data, so that a change that should change nothing can be checked.

    python -m tests.reference.record --check          compare with the committed reference.json
    python -m tests.reference.record --write          record reference.json anew
    python -m tests.reference.record --check FILE     compare with another file, or --write one

Everything runs on the CPU with one thread and fixed seeds, through the command line and the public names of ``manydg``
alone, so that the code behind them can move. The file is flat, ``{key: value}``:

===============  ======================================================================================================
``algorithm.``   every algorithm on every kind of target, some with patient context: final weights, record, predictions
``estimator.``   probabilities of the scikit-learn estimator
``data.``        content hash and file checksums of datasets prepared from synthetic files and from the real demos
``inspect.``     what ``manydg inspect --json`` says about each of them
``backbone.``    every backbone on the data it is made for
``predict.``     the tables that ``manydg predict`` writes for new raw files of each source
``study.``       summary, figures and report of a comparison and of the paper's experiments
===============  ======================================================================================================

Weights are there as a hash, which tells whether any bit changed, and as a few numbers, which tell by how much. The last
bits of a float depend on the processor and on torch: elsewhere than where the file was recorded, hashes of floats are
passed over, numbers may differ by ``TOLERANCE`` and those within text are not compared. Real data that are not there
are passed over too.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import difflib
import hashlib
import html
import io
import json
import math
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

import manydg
from manydg.algorithms import ALGORITHMS
from manydg.backbones import BACKBONES

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Path(__file__).with_name("reference.json")
SHARED = ROOT.parent / "shared" / "data"
TOLERANCE = 5e-3
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}

Record = dict[str, Any]

KINDS = ("binary", "classes", "votes", "multilabel")
SMALL = {"epochs": 2, "batch_size": 32}
CONTEXTS = ("base", "boosting", "prototype", "manydg", "manydg-context", "arm", "bn-adapt")

# They need feature maps, which a table has none of.
OF_SIGNALS = ("mixstyle", "sagnet")

# The data each backbone is made for; a new backbone has to be named here.
BACKBONES_OF: dict[str, tuple[str, ...]] = {
    "table": ("mlp", "tabular"),
    "table-missing": ("tabular",),
    "iiic": ("seizure-cnn",),
    "sleep-edf": ("sleep-cnn",),
    "mimic3": ("gamenet", "retain", "gru"),
    "eicu": ("event-transformer", "retain", "gru"),
    "meds": ("event-transformer", "retain", "gru"),
}
# All but "runtime", which measures seconds.
EXPERIMENTS = (
    "calibration", "cold-start", "context", "context-rivals", "continual", "decomposition", "domain-similarity",
    "limited-data", "norms", "objectives", "orthogonality", "patient-probe", "weights",
)  # fmt: skip
_TIMES = {"seconds", "first_use_seconds", "predict_seconds", "peak_memory_mb"}
# Of the machine, of the moment or of the code, rather than of the result; the run's name is a hash of the code, too.
_VOLATILE = _TIMES | {"integrity", "run", "code_version", "folder", "device"}


# What is recorded.


def record_all() -> Record:
    """Everything, in a folder of its own that is removed afterwards."""
    found: Record = {f"environment.{name}": value for name, value in environment().items()}
    parts: tuple[Callable[[], Record], ...] = (algorithms, estimator, twins, backbones, predictions, study, real_data)
    # Pseudonyms have a random key, and resampling takes patients in the order of their pseudonyms.
    one_key = patch("secrets.token_hex", lambda count: "5a" * count)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings(), one_key:
        warnings.simplefilter("ignore")
        for part in parts:
            start = time.perf_counter()
            found |= part()
            print(f"{part.__name__}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return dict(sorted(found.items()))


def environment() -> dict[str, str]:
    """What the last bits of a float depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def algorithms() -> Record:
    """Every algorithm on every kind of target; some with the patient's own samples, all of them or the earlier ones."""
    found: Record = {}
    for kind in KINDS:
        data = small_dataset(kind)
        for name in ALGORITHMS.names():
            found |= trained(f"algorithm.{name}.{kind}", data, algorithm=name)
        signals = small_signals(kind)
        for name in ("base", *OF_SIGNALS):
            found |= trained(f"algorithm.{name}.{kind}.signals", signals, algorithm=name)
    data = small_dataset("binary", timed=True)
    for context in ("none", "offline", "causal"):
        for name in CONTEXTS:
            found |= trained(f"algorithm.{name}.binary.{context}", data, algorithm=name, context=context)
    return found


def small_dataset(kind: str, *, timed: bool = False) -> manydg.DomainDataset:
    """Sixteen patients of eight rows: class means, a patient's shift, and noise."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(16), 8)
    label = rng.integers(0, 2 if kind == "binary" else 3, len(who))
    x = rng.normal(size=(3, 6))[label] + rng.normal(size=(16, 6))[who] * 0.5 + rng.normal(size=(len(who), 6)) * 0.8
    targets: npt.NDArray[Any] = label
    if kind == "votes":
        targets = rng.integers(0, 3, (len(who), 3)) + 9 * np.eye(3, dtype=int)[label]
    elif kind == "multilabel":
        targets = (x[:, :4] + rng.normal(size=(len(who), 4)) > 0).astype(int)
    times = np.tile(np.arange(8.0), 16) if timed else None
    return manydg.from_arrays(x, targets, who, kind=kind, times=times)


def small_signals(kind: str) -> manydg.DomainDataset:
    """Nine patients of four signals of two channels: a tone for each class, of the patient's own strength."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(9), 4)
    label = rng.integers(0, 2 if kind == "binary" else 3, len(who))
    tone = np.sin(2 * np.pi * (4 + 5 * label[:, None, None]) * np.arange(3000) / 100)
    x = tone * (10 + rng.random(9)[who][:, None, None] * 20) + rng.normal(size=(len(who), 2, 3000)) * 10
    targets = label if kind in ("binary", "classes") else np.eye(3, dtype=int)[label]
    if kind == "votes":
        targets = targets * 9 + 1
    return manydg.from_arrays({"signal": x}, targets, who, kind=kind, info={"settings": {"rate": 100.0}})


def trained(key: str, data: manydg.DomainDataset, **options: Any) -> Record:
    """The weights, the record and the predictions of a run, or why it was refused."""
    out = Path("runs") / key
    torch.manual_seed(0)
    try:
        config = manydg.TrainingConfig(**{**SMALL, "ratios": (0.6, 0.2, 0.2), **options})
        manydg.train(data, config, out=out, device="cpu")
    except manydg.ManyDGError as error:
        return {f"{key}.refused": str(error)}
    return of_run(key, out)


def of_run(key: str, folder: Path) -> Record:
    """What a run folder holds."""
    weights = manydg.open_run(folder).algorithm.state_dict()
    record = without(json.loads((folder / "run.json").read_text()), _VOLATILE)
    found = {f"{key}.weights.{name}": value for name, value in of_arrays(weights).items()}
    with np.load(folder / "predictions.npz") as arrays:
        predicted = {name: arrays[name] for name in ("probabilities",)}
        found[f"{key}.predictions.rows"] = digest([arrays[name].tolist() for name in ("split", "row", "truth")])
    found |= {f"{key}.predictions.{name}": value for name, value in of_arrays(predicted).items()}
    for name in ("epoch", "epochs", "threshold", "parameters", "selection_rule", "threshold_rule"):
        found[f"{key}.{name}"] = record.pop(name)
    for side in ("val", "test"):
        found |= {f"{key}.{side}.{name}": value for name, value in record.pop(side).items()}
    history = record.pop("history")
    if history:
        found |= {f"{key}.loss.{name}": value for name, value in history[-1].get("losses", {}).items()}
    found[f"{key}.history.float_hash"] = digest(history)
    found[f"{key}.per_patient.float_hash"] = digest(list(record.pop("per_patient").values()))
    found[f"{key}.config"] = canonical(record.pop("config"))
    found[f"{key}.record"] = digest(record)
    return found


def of_arrays(arrays: Mapping[str, Any]) -> Record:
    """A hash of every bit, and numbers that say how far two versions are apart."""
    dense = {name: np.ascontiguousarray(np.asarray(arrays[name])) for name in sorted(arrays)}
    state = hashlib.sha256()
    for name, array in dense.items():
        state.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        state.update(array.tobytes())
    flat = np.concatenate([array.astype(np.float64).ravel() for array in dense.values()] or [np.zeros(0)])
    places = np.linspace(0, len(flat) - 1, 8).astype(int) if len(flat) else []
    return {
        "float_hash": state.hexdigest()[:32],
        "count": len(flat),
        "sum": number(math.fsum(flat)),
        "squares": number(math.fsum(flat * flat)),
        "largest": number(np.abs(flat).max(initial=0.0)),
        "sample": [number(flat[place]) for place in places],
    }


def estimator() -> Record:
    """Probabilities of the scikit-learn estimator."""
    data = small_dataset("classes")
    x, y = np.asarray(data.columns["x"]), np.asarray(data.targets)
    groups = np.asarray(data.domains)
    found: Record = {}
    for name in ("base", "manydg"):
        torch.manual_seed(0)
        model = manydg.ManyDGClassifier(algorithm=name, epochs=2, batch_size=32, random_state=0, device="cpu")
        model.fit(x, y, groups=groups)
        values = of_arrays({"probabilities": model.predict_proba(x)})
        found |= {f"estimator.{name}.{entry}": value for entry, value in values.items()}
    return found


def twins() -> Record:
    """Datasets prepared from synthetic raw files of every source, and from tables and arrays."""
    for seed, raw in ((0, "raw"), (1, "new")):
        make = [("iiic", 12, "--samples-per-patient", 6), ("sleep-edf", 10, "--hours", 0.3, "--nights", 1)]
        make += [("mimic3", 120), ("eicu", 40), ("meds", 30)]
        for source, patients, *more in make:
            command("synthesize", source, "--patients", patients, "--seed", seed, "--out", f"{raw}/{source}", *more)
    write_tables()
    table = ("--patient", "patient", "--target", "outcome", "--features", "lab_*", "--time", "hour")
    command("prepare", "iiic", "raw/iiic", "--out", "data/iiic")
    command("prepare", "sleep-edf", "raw/sleep-edf", "--out", "data/sleep-edf")
    command("prepare", "mimic3", "raw/mimic3", "--ndc-map", "raw/mimic3/ndc_to_atc.csv", "--out", "data/mimic3")
    command("prepare", "eicu", "raw/eicu", "--out", "data/eicu")
    command("prepare", "meds", "raw/meds", "--labels", "raw/meds/labels/readmission.parquet", "--out", "data/meds")
    command("prepare", "table", "table.csv", *table, "--out", "data/table")
    command("prepare", "table", "missing.csv", *table, "--missing", "keep", "--out", "data/table-missing")
    command("prepare", "arrays", "--x", "x.npy", "--y", "y.npy", "--patient", "who.npy", "--out", "data/arrays")
    found: Record = {}
    for folder in sorted(Path("data").iterdir()):
        found |= of_dataset(f"twin.{folder.name}", folder)
    return found


def write_tables() -> None:
    """Tables of 24 patients and ten hours each, one of them with empty cells, and the same as arrays."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(24), 10)
    x = np.round(rng.normal(size=(240, 5)) + rng.normal(size=(24, 5))[who], 4)
    label = (x[:, 0] + rng.normal(size=240) > 0).astype(int)
    labs = {f"lab_{place}": x[:, place] for place in range(5)}
    hours = np.tile(np.arange(10.0), 24)
    table = pl.DataFrame({"patient": [f"p{code:02d}" for code in who], "hour": hours, "outcome": label, **labs})
    table.write_csv("table.csv")
    gaps = [pl.when(pl.Series(rng.random(240) < 0.2)).then(None).otherwise(pl.col(name)).alias(name) for name in labs]
    table.with_columns(gaps).write_csv("missing.csv")
    for name, array in (("x", x), ("y", label), ("who", who)):
        np.save(f"{name}.npy", array)


def of_dataset(key: str, folder: Path) -> Record:
    """The content of a dataset folder, without where, when and by which program it was made."""
    description = json.loads((folder / "dataset.json").read_text())
    info = description["info"]
    found = {f"data.{key}.content_hash": manydg.open_dataset(folder).content_hash()}
    for name, entry in description["files"].items():
        found[f"data.{key}.file.{name}"] = f"{entry['dtype']} {entry['shape']} {entry['checksum']}"
    for name in ("samples", "patients", "schema_version", "columns", "target"):
        found[f"data.{key}.{name}"] = canonical(description[name])
    found[f"data.{key}.cohort_flow"] = [canonical(step) for step in info.get("cohort_flow", [])]
    # Synthetic MEDS rows of one subject, time and code come in any order; the prepared dataset does not depend on it.
    if info.get("provenance", {}).get("source") != "meds":
        found[f"data.{key}.raw_files"] = digest(info.get("provenance", {}).get("files"))
    found[f"data.{key}.info"] = digest({name: value for name, value in info.items() if name != "provenance"})
    said = without(json.loads(command("inspect", folder, "--json")), {"dataset", "path", "folder"})
    return found | {f"inspect.{key}.{name}": canonical(value) for name, value in said.items() if name != "provenance"}


def backbones() -> Record:
    """Every backbone on the data it is made for, through the command line."""
    if missing := set(BACKBONES.names()) ^ {name for names in BACKBONES_OF.values() for name in names}:
        raise SystemExit(f"BACKBONES_OF does not fit the registered backbones: {', '.join(sorted(missing))}")
    found: Record = {}
    for data, names in BACKBONES_OF.items():
        for name in names:
            for algorithm in ("base", "manydg"):
                found |= trained_by_command(f"backbone.{name}.{data}.{algorithm}", data, algorithm, backbone=name)
    # Context of signals is made of the backbone's spectrograms.
    for data in ("iiic", "sleep-edf", "table"):
        key = f"backbone.auto.{data}.manydg-context"
        found |= trained_by_command(key, data, "manydg-context")
    return found


def trained_by_command(key: str, data: str, algorithm: str, backbone: str | None = None) -> Record:
    out = Path("runs") / key
    small = ["--epochs", 1, "--batch-size", 64, "--device", "cpu", *(["--backbone", backbone] if backbone else [])]
    command("train", f"data/{data}", "--algorithm", algorithm, "--out", out, *small)
    return of_run(key, out)


def predictions() -> Record:
    """The tables of ``manydg predict`` on new raw files."""
    models = {"table": "mlp", "table-missing": "tabular", "iiic": "seizure-cnn", "sleep-edf": "sleep-cnn"}
    models |= {"mimic3": "gamenet", "eicu": "event-transformer", "meds": "event-transformer"}
    raw = {"table": Path("table.csv"), "table-missing": Path("missing.csv")}
    raw |= {source: Path("new") / source for source in models if source not in raw}
    more = {"mimic3": ("--ndc-map", "new/mimic3/ndc_to_atc.csv")}
    found: Record = {}
    for data, backbone in models.items():
        run, out = Path("runs") / f"backbone.{backbone}.{data}.base", Path("predicted") / data
        command("predict", run, raw[data], "--out", out, *more.get(data, ()))
        tables = sorted(out.glob("*.csv"))
        # A recording has a table each: two of them will do.
        for path in tables[:2]:
            found |= of_table(f"predict.{data}.{path.stem}", path)
        found[f"predict.{data}.files"] = sorted(path.name for path in out.iterdir())
        about = without(json.loads((out / "about.json").read_text()), {"code_version", "run", "seconds"})
        found |= {f"predict.{data}.about.{name}": value for name, value in flat(about)}
    found["predict.table.text"] = Path("predicted/table/predictions.csv").read_text().splitlines()[:40]
    return found


def of_table(key: str, path: Path) -> Record:
    """A hash of a table's text and the sum of each column of numbers."""
    found: Record = {f"{key}.float_hash": hashlib.sha256(path.read_bytes()).hexdigest()[:32]}
    table = pl.read_csv(path, infer_schema_length=None)
    found[f"{key}.columns"] = table.columns
    found[f"{key}.rows"] = table.height
    for name in table.columns:
        if table[name].dtype.is_numeric():
            found[f"{key}.sum.{name}"] = number(math.fsum(table[name].drop_nulls().to_list()))
    return found


def study() -> Record:
    """A comparison over two seeds, then the paper's experiments; their summaries, figures and reports."""
    small = ("--epochs", 2, "--batch-size", 32, "--device", "cpu")
    rivals = ("--algorithms", "base,boosting,manydg", "--seeds", 2)
    found: Record = {}
    for data in ("table", "mimic3"):
        # Boosting reads tables only.
        chosen = rivals if data == "table" else ("--algorithms", "base,manydg", "--seeds", 2)
        command("compare", f"data/{data}", *chosen, "--out", f"results-{data}", *small)
        found |= of_study(f"study.compare.{data}", Path(f"results-{data}"))
    for name in EXPERIMENTS:
        asked = ("--algorithms", "base,manydg", "--seeds", 1, "--out", "results-table", *small)
        command("experiment", name, "data/table", *asked)
    return found | of_study("study.experiments", Path("results-table"))


def of_study(key: str, folder: Path) -> Record:
    """All numbers of a results folder, the figures and what the report says."""
    found: Record = {}
    for row in csv.DictReader(io.StringIO((folder / "summary.csv").read_text())):
        place = ".".join(row.pop(name) for name in ("experiment", "row", "metric"))
        kept = {name: text for name, text in row.items() if text and name not in _TIMES}
        found |= {f"{key}.summary.{place}.{name}": as_value(text) for name, text in kept.items()}
    for line in (folder / "results.jsonl").read_text().splitlines():
        record = json.loads(line)
        place = f"{record['experiment']}.{record['algorithm']}.{record['seed']}.{canonical(record['variant'])}"
        place = f"{key}.record.{place}.{record['config'].get('context', '')}"
        found |= {f"{place}.{name}": value for name, value in flat(record["test"])}
        with np.load(folder / record["folder"] / "predictions.npz") as arrays:
            values = of_arrays({"probabilities": arrays["probabilities"]})
        found |= {f"{place}.predictions.{name}": values[name] for name in ("float_hash", "squares")}
    for path in sorted((folder / "figures").glob("*.json")):
        figure = json.loads(path.read_text())
        # Time and memory of a step are of the machine.
        if "patients_step" in path.stem:
            found[f"{key}.figure.{path.stem}"] = figure.get("title")
            continue
        numbers = [value for _, value in flat(figure) if isinstance(value, float)]
        found |= {f"{key}.figure.{path.stem}.{name}": value for name, value in of_arrays({"x": numbers}).items()}
        found[f"{key}.figure.{path.stem}.words"] = digest([v for _, v in flat(figure) if not isinstance(v, float)])
    command("report", folder, "--out", f"{key}.html")
    found[f"{key}.report"] = visible_text(Path(f"{key}.html").read_text(encoding="utf-8"))
    return found


def real_data() -> Record:
    """Datasets prepared from the real demos; where they are not there, why that is."""
    found: Record = {}
    for key, prepare in {
        "mimic3": real_mimic3,
        "eicu": real_eicu,
        "eicu-without-lab": real_eicu_without_lab,
        "kidney": real_kidney,
        "sleep-features": real_sleep_features,
        "sleep-edf": real_sleep_edf,
    }.items():
        out = Path("real") / key
        reason = prepare(out)
        found |= {f"data.real.{key}.skipped": reason} if reason else of_dataset(f"real.{key}", out)
    return found


def absent(*names: str) -> str:
    """Why real data cannot be read; empty where they can."""
    gone = [name for name in names if not (SHARED / name).exists()]
    return f"not in ../shared/data: {', '.join(gone)}" if gone else ""


def real_mimic3(out: Path) -> str:
    if reason := absent("mimic3_demo", "drug_mapping"):
        return reason
    command("prepare", "mimic3", SHARED / "mimic3_demo", "--ndc-map", SHARED / "drug_mapping/ndc_to_atc.csv",
            "--out", out)  # fmt: skip
    return ""


def real_eicu(out: Path) -> str:
    if reason := absent("eicu_demo_with_lab"):
        return reason
    command("prepare", "eicu", SHARED / "eicu_demo_with_lab", "--out", out)
    return ""


def real_eicu_without_lab(out: Path) -> str:
    if reason := absent("eicu_demo"):
        return reason
    command("prepare", "eicu", SHARED / "eicu_demo", "--without", "lab", "--out", out)
    return ""


def real_kidney(out: Path) -> str:
    """The first 60 stays of the hourly kidney-injury table, each taken for a patient."""
    if reason := absent("aki_hourly_eicu_demo"):
        return reason
    hourly = SHARED / "aki_hourly_eicu_demo"
    hours = pl.read_parquet(hourly / "dyn.parquet").join(
        pl.read_parquet(hourly / "outc.parquet"), on=["stay_id", "time"], how="inner"
    )
    first = hours["stay_id"].unique().sort()[:60].implode()
    kept = hours.filter(pl.col("stay_id").is_in(first)).sort("stay_id", "time")
    measured = [name for name in kept.columns if name not in ("stay_id", "time", "label")]
    kept.select(
        "stay_id", (pl.col("time").dt.total_minutes() / 60).alias("hour"), pl.col("label").cast(pl.Int8),
        pl.col(measured).name.prefix("value_"),
    ).write_parquet("kidney.parquet")  # fmt: skip
    command("prepare", "table", "kidney.parquet", "--patient", "stay_id", "--target", "label", "--features", "value_*",
            "--time", "hour", "--missing", "keep", "--out", out)  # fmt: skip
    return ""


def real_sleep_features(out: Path) -> str:
    """Every tenth epoch of the first six people of the sleep features, nights as sessions."""
    if reason := absent("sleep_edf_78_features"):
        return reason
    epochs = pl.read_parquet(SHARED / "sleep_edf_78_features" / "epochs.parquet")
    first = epochs["subject_id"].unique().sort()[:6].implode()
    epochs.filter(pl.col("subject_id").is_in(first)).gather_every(10).write_parquet("sleep.parquet")
    command("prepare", "table", "sleep.parquet", "--patient", "subject_id", "--target", "stage", "--features", "EEG_*",
            "--time", "epoch_idx", "--session", "night_id", "--out", out)  # fmt: skip
    return ""


def real_sleep_edf(out: Path) -> str:
    if reason := absent("sleep_edf_hypnograms"):
        return reason
    if not list((SHARED / "sleep_edf_hypnograms").rglob("*PSG.edf")):
        return "../shared/data/sleep_edf_hypnograms has hypnograms without their recordings"
    command("prepare", "sleep-edf", SHARED / "sleep_edf_hypnograms", "--unpaired", "skip", "--out", out)
    return ""


# Helpers.


def command(*arguments: object) -> str:
    """What ``manydg ARGUMENTS`` prints, run in this process."""
    from manydg.cli import main

    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["manydg", *map(str, arguments)]
    torch.manual_seed(0)
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = before
    if code:
        raise SystemExit(f"manydg {' '.join(map(str, arguments))}: exit code {code}\n{err.getvalue()}")
    return out.getvalue()


def visible_text(page: str) -> list[str]:
    """The words of a report, a line each, without what the machine, the moment or the code's version decides."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    page = re.sub(r"<!--.*?-->", " ", page, flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]*>", "\n", page))
    for pattern, instead in (
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "DATE"),
        (r"\b\d+\.\d+\.\d+\+[0-9a-f]{6,}", "VERSION"),
        (r"\bmanydg \d+\.\d+\.\d+", "manydg VERSION"),
        (r"\bruns/[0-9a-f]{16}\b", "runs/RUN"),
        (r"(?<![\w.])\d[\d,.]* (seconds|s|ms|minutes|MB|GB|MiB|GiB)\b", r"N \1"),
    ):
        text = re.sub(pattern, instead, text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line]


def without(value: Any, names: set[str]) -> Any:
    """JSON values without some keys, at any depth."""
    if isinstance(value, dict):
        return {key: without(entry, names) for key, entry in value.items() if key not in names}
    if isinstance(value, list):
        return [without(entry, names) for entry in value]
    return value


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value within JSON values, with its path."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if entries is None:
        yield key, value
        return
    for name, entry in entries:
        yield from flat(entry, f"{key}.{name}" if key else str(name))


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:32]


def number(value: float) -> float | None:
    """A JSON number; None where it is not finite."""
    return float(value) if math.isfinite(value) else None


def as_value(text: str) -> float | str | None:
    """A cell of a CSV file."""
    try:
        return number(float(text))
    except ValueError:
        return text


# Comparing.


def differences(old: Record, new: Record) -> tuple[list[str], str]:
    """A line for each key that differs, and a line about the largest difference of two numbers."""
    names = [name for name in {**old, **new} if name.startswith("environment.")]
    elsewhere = [name for name in names if old.get(name) != new.get(name)]
    skipped = {name.removesuffix("skipped") for name in {**old, **new} if name.endswith(".skipped")}
    skipped |= {name.replace("data.", "inspect.", 1) for name in skipped}
    lines, largest = [], (0.0, "")
    for key in sorted({**old, **new}):
        if key.startswith("environment.") or any(key.startswith(name) for name in skipped):
            continue
        if elsewhere and (key.endswith("float_hash") or key.startswith("data.twin.")):
            continue
        if key not in old or key not in new:
            lines.append(f"{key}: {'is new' if key in new else 'is gone'}")
            continue
        before, after = old[key], new[key]
        if before == after:
            continue
        gaps = number_gaps(before, after)
        largest = max([largest, *((gap, key) for gap in gaps)])
        if elsewhere and gaps and max(gaps) <= TOLERANCE * max(1.0, max(map(abs, numbers_in(before)))):
            continue
        if elsewhere and masked(before) == masked(after):
            continue
        lines.append(f"{key}: {described(before, after)}")
    if old and elsewhere:
        changed = ", ".join(f"{old.get(name)} is now {new.get(name)}" for name in elsewhere)
        print(f"recorded elsewhere ({changed}): hashes of floats passed over, other numbers within {TOLERANCE}")
    said = f"largest difference of two numbers: {largest[0]!r}" + (f" ({largest[1]})" if largest[1] else "")
    return lines, said


def masked(text: Any) -> Any:
    """Lines of text without their numbers."""
    if not isinstance(text, list):
        return text
    return [re.sub(r"[-+−]?\d[\d.,]*", "N", line) if isinstance(line, str) else line for line in text]


def numbers_in(value: Any) -> list[float]:
    return [float(entry) for entry in (value if isinstance(value, list) else [value])]


def number_gaps(before: Any, after: Any) -> list[float]:
    """Absolute differences of two numbers or lists of numbers; none where they are not."""
    pairs = list(zip(before, after, strict=False)) if isinstance(before, list) else [(before, after)]
    if isinstance(before, list) and (not isinstance(after, list) or len(before) != len(after)):
        return []
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for pair in pairs for value in pair):
        return []
    return [abs(float(first) - float(second)) for first, second in pairs]


def described(before: Any, after: Any) -> str:
    if gaps := number_gaps(before, after):
        return f"was {before!r}, is {after!r}; differs by {max(gaps)!r}"
    if isinstance(before, list) and isinstance(after, list):
        changed = difflib.unified_diff(list(map(str, before)), list(map(str, after)), "was", "is", lineterm="", n=0)
        return "\n    " + "\n    ".join(list(changed)[2:42])
    return f"was {before!r}, is {after!r}"


def main() -> None:
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        # Libraries read the number of threads as they are loaded.
        os.execve(sys.executable, [sys.executable, __file__, *sys.argv[1:]], {**os.environ, **ENVIRONMENT})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=REFERENCE)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare with the file")
    what.add_argument("--write", action="store_true", help="write the file, and say how it differs from before")
    asked = parser.parse_args()
    file = asked.file.resolve()
    torch.set_num_threads(1)
    old = json.loads(file.read_text()) if file.exists() else {}
    if asked.check and not old:
        sys.exit(f"there is no {file}: record it with --write")
    # As it is read from a file.
    new = json.loads(json.dumps(record_all(), allow_nan=False))
    lines, largest = differences(old, new)
    if old:
        print("\n".join([*lines, f"{len(lines)} of {len(new)} entries differ", largest]))
    if asked.write:
        file.write_text(json.dumps(new, indent=0, allow_nan=False) + "\n")
        print(f"wrote {file}: {len(new)} entries")
    elif lines:
        sys.exit(1)


if __name__ == "__main__":
    main()
