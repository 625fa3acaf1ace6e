"""A results folder as a study leaves it: several algorithms and seeds on three kinds of label, and figures' data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manydg.data.info import TargetSpec
from manydg.evaluation.metrics import choose_threshold, score, score_patients
from manydg.files import as_json, file_checksum, with_checksum
from manydg.targets import target_of

SKILL = {
    "manydg": 1.30,
    "base": 1.25,
    "prototype": 1.28,
    "manydg-random-pairs": 1.27,
    "dann": 1.15,
    "condadv": 1.18,
    "irm": 1.10,
    "mldg": 0.95,
    "boosting": 1.22,
}
STAGES = ("Wake", "N1", "N2", "N3", "REM")
CASES = (
    "case 1: supervised only",
    "case 2: with MMD",
    "case 3: with reconstruction",
    "case 4: with MMD and reconstruction",
    "all four objectives",
)
DRUGS = tuple(f"A{number:02d}B" for number in range(12))


class StudyMaker:
    """Writes runs that look as if they had been trained; every metric is computed from the predictions written.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[dict[str, Any]] = []

    def run(
        self,
        dataset: str,
        kind: str,
        algorithm: str,
        seed: int,
        experiment: str = "compare",
        *,
        skill: float,
        **more: Any,
    ) -> dict[str, Any]:
        """One run's record and predictions."""
        names = {
            "classes": STAGES, "binary": ("stays out", "readmitted"), "multilabel": DRUGS, "regression": ("days",)
        }[kind]  # fmt: skip
        target = target_of(TargetSpec(kind, tuple(names)))
        identity = hashlib.blake2b(
            json.dumps([dataset, algorithm, seed, experiment, more.get("variant")]).encode(), digest_size=8
        ).hexdigest()
        folder = self.folder / "runs" / identity
        folder.mkdir(parents=True)
        arrays = make_predictions(kind, len(names), dataset, seed, skill, int(identity[:6], 16))
        np.savez_compressed(folder / "predictions.npz", **arrays)
        val, test = (arrays["split"] == code for code in (0, 1))
        threshold, rule = choose_threshold(target, arrays["truth"][val], arrays["probabilities"][val])
        truth, probabilities = arrays["truth"][test], arrays["probabilities"][test]
        metrics = score(target, truth, probabilities, threshold)
        patients = score_patients(target, truth, probabilities, arrays["patient"][test], threshold)
        record = {
            "schema": 1, "run": identity, "experiment": experiment, "variant": {}, "algorithm": algorithm, "seed": seed,
            "dataset": dataset, "dataset_hash": "0123456789abcdef", "target": {"kind": kind, "names": list(names)},
            "samples": {"train": 9000, "val": int(val.sum()), "test": int(test.sum())},
            "patients": {"train": 62, "val": 8, "test": len(patients)}, "config": {"algorithm": algorithm},
            "code_version": "0.1.0+test", "selection_rule": f"epoch with the highest validation {target.selection}",
            "threshold": threshold, "threshold_rule": rule, "epoch": 9, "epochs": 12,
            "val": as_json(score(target, arrays["truth"][val], arrays["probabilities"][val], threshold)),
            "test": as_json(metrics),
            "per_patient": {
                str(arrays["pseudonyms"][code]): {**as_json(values), "samples": int(values["samples"])}
                for code, values in patients.items()
            },
            "history": make_history(target.selection, metrics[target.selection], algorithm, seed),
            "seconds": 120.0 + seed, "peak_memory_mb": 900.0, "parameters": 120_000, "device": "cpu", "status": "ok",
            "error": None, "folder": f"runs/{identity}", **more,
        }  # fmt: skip
        self.records.append(record)
        return record

    def write(self, study: dict[str, Any], figures: dict[str, Any]) -> Path:
        """Everything to disk."""
        lines = "".join(json.dumps(with_checksum(record)) + "\n" for record in self.records)
        (self.folder / "results.jsonl").write_text(lines)
        (self.folder / "study.json").write_text(json.dumps(with_checksum(study)))
        for predictions in self.folder.glob("runs/*/predictions.npz"):
            record = next(record for record in self.records if record["folder"] == f"runs/{predictions.parent.name}")
            covered = {predictions.name: file_checksum(predictions)}
            predictions.with_name("run.json").write_text(json.dumps(with_checksum(record, covered)))
        (self.folder / "figures").mkdir(exist_ok=True)
        for name, figure in figures.items():
            (self.folder / "figures" / f"{name}.json").write_text(json.dumps(figure))
        return self.folder


def pseudonym(dataset: str, number: int) -> str:
    return "P-" + hashlib.blake2b(f"{dataset}{number}".encode(), digest_size=5).hexdigest()


def make_predictions(kind: str, size: int, dataset: str, seed: int, skill: float, salt: int) -> dict[str, Any]:
    """Probabilities of 8 validation and 10 test patients; some patients are harder than others."""
    rng, noise = np.random.default_rng([seed, size]), np.random.default_rng(salt)
    chosen = rng.permutation(40)[:18]
    per = 60 if kind != "multilabel" else 12
    patient = np.repeat(np.arange(18), per)
    ease = (0.45 + 0.9 * np.random.default_rng(size).random(40))[chosen][patient]
    if kind == "multilabel":
        truth = (rng.random((len(patient), size)) < np.linspace(0.6, 0.1, size)).astype(np.int64)
        logits = (2 * truth - 1) * skill * ease[:, None] + noise.normal(size=truth.shape) * 1.2 - 0.3
        probabilities = 1 / (1 + np.exp(-logits))
    elif kind == "regression":
        truth = rng.gamma(2.0, 3.0, len(patient))
        probabilities = truth[:, None] + noise.normal(size=(len(patient), 1)) * 4 / (skill * ease[:, None])
    else:
        share = np.array([0.4, 0.08, 0.3, 0.1, 0.12]) if size == 5 else np.array([0.84, 0.16])
        truth = rng.choice(size, p=share, size=len(patient))
        logits = np.log(share) + 2.2 * skill * ease[:, None] * np.eye(size)[truth]
        logits = logits + noise.normal(size=logits.shape)
        probabilities = np.exp(1.3 * logits) / np.exp(1.3 * logits).sum(axis=1, keepdims=True)
    return {
        "split": np.where(patient < 8, 0, 1).astype(np.int8),
        "row": np.arange(len(patient)),
        "patient": patient.astype(np.int64),
        "pseudonyms": np.array([pseudonym(dataset, int(number)) for number in chosen]),
        "probabilities": probabilities.astype(np.float32),
        "truth": truth,
    }


def make_history(metric: str, end: float, algorithm: str, seed: int) -> list[dict[str, Any]]:
    """Twelve epochs that rise to the end value."""
    rng = np.random.default_rng(seed)
    history = []
    for epoch in range(1, 13):
        rise = 1 - np.exp(-epoch / 3)
        losses = {"supervised": 1.5 - 0.9 * rise}
        if algorithm == "manydg":
            losses |= {"mmd": 0.5 - 0.4 * rise, "reconstruction": -1.7 * rise, "similarity": -0.95 * rise}
        value = end * rise + rng.normal() * 0.005
        history.append({"epoch": epoch, "losses": losses, "val": {metric: value}, "seconds": 3.0 + rng.random() * 0.3})
    return history


def make_figures(dataset: str) -> dict[str, Any]:
    """One figure of each kind."""
    rng = np.random.default_rng(1)
    patients, labels = np.repeat(np.arange(14), 60), rng.integers(0, 5, 840)
    by_patient, by_label = rng.normal(size=(14, 2))[patients] * 2, rng.normal(size=(5, 2))[labels] * 3
    noise = {name: rng.normal(size=(840, 2)) for name in ("v", "parallel", "orthogonal", "z")}
    centres = {
        "v": by_patient + by_label, "parallel": by_patient, "orthogonal": by_label, "z": by_patient * 0.7,
    }  # fmt: skip
    panels = [
        {"name": name, "xy": np.round(centres[name] + noise[name], 3).tolist(), "patient_accuracy": 0.41,
         "label_accuracy": 0.77}
        for name in centres
    ]  # fmt: skip
    norm = np.abs(rng.normal(size=(2, 900)) * 0.4 + np.array([[3.0], [2.0]]))
    return {
        "embedding": {
            "kind": "embedding", "title": "Where samples lie", "dataset": dataset, "data": {
                "panels": panels, "patients": patients.tolist(), "labels": labels.tolist(), "label_names": list(STAGES),
                "pseudonyms": [pseudonym(dataset, number) for number in range(14)], "method": "two components",
            },
        },
        "norms": {
            "kind": "norms", "title": "Norms of the two parts", "dataset": dataset, "data": {"splits": [
                {"name": name, "parallel": norm[0].tolist(), "orthogonal": norm[1].tolist()}
                for name in ("train", "test")
            ]},
        },
        "similarity": {
            "kind": "similarity", "title": "Similarity of z", "dataset": dataset, "data": {"rows": [
                {"name": "training patients", "within": 0.9931, "across": 0.9885, "within_interval": [0.992, 0.994]},
                {"name": "test patients", "within": 0.9920, "across": 0.9890},
            ]},
        },
        "orthogonality": {
            "kind": "orthogonality", "title": "Weights of linear models", "dataset": dataset, "data": {"rows": [
                {"first": "v labels", "second": "orthogonal labels", "cosine": 0.81, "sd": 0.02},
                {"first": "v domains, parallel domains", "second": "", "cosine": 0.31, "sd": 0.03},
                {"first": "v labels", "second": "v domains", "cosine": 0.02, "sd": 0.01},
                {"first": "v → labels", "second": "v∥z → labels", "cosine": 0.09, "paper": 0.0773},
            ]},
        },
        **{
            f"objectives-{term}": {
                "kind": "curve", "title": f"The {term} term while training", "experiment": "objectives",
                "dataset": dataset, "data": {
                    "x": {"label": "epoch", "values": [1, 2, 3]}, "y": {"label": f"{term} loss (weighted)"},
                    "series": [{"name": name, "mean": [1.0, 0.5, 0.1 * len(name)]} for name in CASES],
                },
            }
            for term in ("supervised", "mmd")
        },
        "continual-kappa-4": {
            "kind": "curve", "title": "New patients step by step, with four samples of each earlier patient",
            "experiment": "continual", "dataset": dataset,
            "note": "Scaled down: 30 first patients, steps of 3.", "data": {
                "x": {"label": "patients seen", "values": [30 + 3 * step for step in range(11)]},
                "y": {"label": "kappa"}, "series": [
                    {"name": name, "mean": [0.6 + 0.01 * step + shift for step in range(11)],
                     "low": [0.59 + 0.01 * step + shift for step in range(11)],
                     "high": [0.61 + 0.01 * step + shift for step in range(11)]}
                    for name, shift in (("manydg", 0.02), ("base", 0.0), ("mldg", -0.03))
                ],
            },
        },
    }  # fmt: skip


def make_study(folder: Path) -> Path:
    """A whole study over three datasets."""
    maker = StudyMaker(folder)
    kinds = {"sleep-edf": "classes", "eicu": "binary", "mimic3": "multilabel"}
    for dataset, kind in kinds.items():
        methods = SKILL if dataset == "sleep-edf" else {name: SKILL[name] for name in ("manydg", "base", "prototype")}
        for seed in range(5):
            for algorithm, skill in methods.items():
                maker.run(dataset, kind, algorithm, seed, skill=skill)
    _ablations(maker)
    about = {
        name: {
            "name": name, "hash": "0123456789abcdef", "samples": 12_000, "patients": 78,
            "target": {"kind": kind, "names": maker_names(maker, name)},
            "label_counts": {label: 4000 // (rank + 1) for rank, label in enumerate(maker_names(maker, name))},
            "samples_per_patient": {"0.0": 12, "0.25": 80, "0.5": 150, "0.75": 210, "1.0": 400},
            "cohort_flow": [
                {"step": "recordings found", "patients": 80, "recordings": 155},
                {"step": "with a reference label", "patients": 78, "samples": 12_400},
                {"step": "movement and unknown left out", "patients": 78, "samples": 12_000},
            ],
            "provenance": {"source": name, "program": "manydg 0.1.0", "files": [], "options": {"trim": 30}},
        }
        for name, kind in kinds.items()
    }  # fmt: skip
    commands = {name: f"manydg experiment {name} DATA --out RESULTS" for name in ("objectives", "weights", "norms")}
    study = {
        "datasets": about, "commands": {"compare": "manydg compare DATA --seeds 5 --out RESULTS", **commands},
        "created": "2026-11-15 10:00:00 UTC", "code_version": "0.1.0+test",
    }  # fmt: skip
    return maker.write(study, make_figures("sleep-edf"))


def maker_names(maker: StudyMaker, dataset: str) -> list[str]:
    return list(next(record for record in maker.records if record["dataset"] == dataset)["target"]["names"])


def _ablations(maker: StudyMaker) -> None:
    for seed in range(2):
        for number, case in enumerate(CASES):
            variant = {"case": case}
            maker.run("sleep-edf", "classes", "manydg", seed, "objectives", skill=1.2 + 0.02 * number, variant=variant)
        for weight in ("mmd", "reconstruction", "similarity"):
            for value in (0.1, 1.0, 10.0):
                variant = {"changed": weight, "weight": value}
                skill = 1.3 - 0.05 * abs(np.log10(value))
                maker.run("sleep-edf", "classes", "manydg", seed, "weights", skill=skill, variant=variant)
        greedy = {"changed": "greedy combination 0.2, 0.2, 2.0"}
        maker.run("sleep-edf", "classes", "manydg", seed, "weights", skill=1.31, variant=greedy)
        for replay in (4, 0):
            variant = {"samples replayed": replay, "first": 30, "each": 3}
            maker.run("sleep-edf", "classes", "manydg", seed, "continual", skill=1.1 + replay / 20, variant=variant)
        for people in (10, 20, 62):
            for algorithm in ("manydg", "base", "mldg"):
                skill = SKILL[algorithm] * people / (people + 10)
                variant = {"training patients": people}
                maker.run("sleep-edf", "classes", algorithm, seed, "limited-data", skill=skill, variant=variant)
    maker.records.append({
        "schema": 1, "run": "f" * 16, "experiment": "compare", "variant": {}, "algorithm": "irm", "seed": 5,
        "dataset": "sleep-edf", "config": {}, "code_version": "0.1.0+test", "seconds": 1.0, "status": "failed",
        "error": "Traceback (most recent call last):\n  File \"x.py\"\nValueError: patient 4711 is odd",
        "folder": "runs/" + "f" * 16,
    })  # fmt: skip


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with three datasets."""
    return make_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="session")
def report_page(study_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the study."""
    from manydg.report import write_report

    return write_report(study_folder, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def maker(tmp_path: Path) -> StudyMaker:
    """A maker of small results folders."""
    return StudyMaker(tmp_path)
