"""Preparing the four datasets against merely reading the same files, on synthetic twins of any size.

    python -m benchmarks.sources --scale 1 --temporary /big/disk

At scale 1 the twins have the size of the originals: 4.1 million prescriptions, 39 million laboratory rows, 153 nights
of 20 hours, 165,000 samples of 16 x 2000; the last needs 42 GB of disk while it runs. Each step runs in a process of
its own, so that its peak memory is its own. "Reading" counts the cells of the needed columns with polars' streaming
engine, the finite values of the arrays with numpy, or reads the two channels with edfio. It is done once to fill the
file cache, then once before preparing and once after it, and the mean of these two is what preparing is compared with.
Arrays in the file cache are counted far faster than a copy of them can be written, so that a plain copy is timed too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FULL = {"mimic3": 41_000, "eicu": 144_500, "sleep-edf": 78, "iiic": 2_702}
COLUMNS = {
    "mimic3": {
        "ADMISSIONS": ["SUBJECT_ID", "HADM_ID", "ADMITTIME", "DISCHTIME"],
        "DIAGNOSES_ICD": ["SUBJECT_ID", "HADM_ID", "ICD9_CODE"],
        "PROCEDURES_ICD": ["SUBJECT_ID", "HADM_ID", "ICD9_CODE"],
        "PRESCRIPTIONS": ["SUBJECT_ID", "HADM_ID", "NDC"],
    },
    "eicu": {
        "patient": ["patientunitstayid", "patienthealthsystemstayid", "hospitaladmitoffset", "uniquepid"],
        "diagnosis": ["patientunitstayid", "diagnosisoffset", "diagnosisstring", "icd9code"],
        "lab": ["patientunitstayid", "labresultoffset", "labname", "labresult", "labresulttext"],
        "medication": ["patientunitstayid", "drugstartoffset", "drugname", "drughiclseqno", "dosage", "frequency"],
        "physicalExam": ["patientunitstayid", "physicalexamoffset", "physicalexampath"],
        "treatment": ["patientunitstayid", "treatmentoffset", "treatmentstring"],
    },
}
MORE: dict[str, dict[str, Any]] = {"iiic": {"samples_per_patient": 63}}
ROWS_AT_ONCE = 128


def source_module(source: str) -> Any:
    import importlib

    return importlib.import_module(f"manydg.sources.{source.replace('-', '_')}")


def synthesize(source: str, raw: Path, patients: int) -> dict[str, int]:
    source_module(source).synthesize(raw, patients=patients, seed=0, **MORE.get(source, {}))
    return {"bytes": sum(path.stat().st_size for path in raw.rglob("*") if path.is_file())}


def read(source: str, raw: Path) -> dict[str, int]:
    """Merely read what preparing needs; returns how much it was."""
    if source == "sleep-edf":
        return _read_edf(raw)
    if source == "iiic":
        return {"values": sum(_count_finite(raw / name) for name in ("signals.npy", "votes.npy"))}
    import polars as pl

    rows = {}
    for name, columns in COLUMNS[source].items():
        path = next(raw.glob(f"{name}.csv*"))
        counts = pl.scan_csv(path).select(pl.len().alias("rows"), pl.col(columns).count()).collect(engine="streaming")
        rows[name] = int(counts["rows"].item())
    return rows


def _read_edf(raw: Path) -> dict[str, int]:
    import edfio

    nights = sorted(raw.glob("*-PSG.edf"))
    for path in nights:
        recording = edfio.read_edf(path)
        for label in ("EEG Fpz-Cz", "EEG Pz-Oz"):
            assert len(recording.get_signal(label).data)
    return {"nights": len(nights)}


def _count_finite(path: Path) -> int:
    import numpy as np

    total, rows = 0, len(np.load(path, mmap_mode="r"))
    for start in range(0, rows, ROWS_AT_ONCE):
        # A map of its own for each block, lest pages already read count as memory in use.
        total += int(np.count_nonzero(np.isfinite(np.load(path, mmap_mode="r")[start : start + ROWS_AT_ONCE])))
    return total


def copy(source: str, raw: Path) -> dict[str, int]:
    """Copy the arrays to the disk and delete the copy: what preparing them cannot do without, less the checksums."""
    target = raw.with_name("copy.npy")
    shutil.copyfile(raw / "signals.npy", target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
    size = target.stat().st_size
    target.unlink()
    return {"bytes": size}


def prepare(source: str, raw: Path) -> dict[str, int]:
    from manydg.data.storage import read_description

    needs = {"ndc_map": raw / "ndc_to_atc.csv"} if source == "mimic3" else {}
    out = source_module(source).prepare(raw, raw.with_name("out"), **needs)
    description = read_description(out)
    return {name: description[name] for name in ("samples", "patients")}


def measured_step(step: str, source: str, raw: Path, patients: int) -> dict[str, Any]:
    """What a process of its own does; imports take the same time at any size and are not counted."""
    source_module(source)
    began, used = time.perf_counter(), time.process_time()
    counts = (
        synthesize(source, raw, patients)
        if step == "synthesize"
        else {"read": read, "copy": copy, "prepare": prepare}[step](source, raw)
    )
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - used, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "counts": counts,
    }


def in_process(step: str, source: str, raw: Path, patients: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.sources", "--step", step, "--sources", source]
    command += ["--raw", str(raw), "--patients", str(patients)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"{source}, {step}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{source:10s}{step:11s}{json.dumps(result)}", flush=True)
    return result


def measure(source: str, scale: float, temporary: Path | None) -> dict[str, Any]:
    """Synthesize, read, prepare and read again; everything written is deleted."""
    folder = Path(tempfile.mkdtemp(prefix=f"manydg-{source}-", dir=temporary))
    try:
        patients = max(2, round(FULL[source] * scale))
        steps = ("synthesize", "read", "read", "prepare", "read")
        made, _, before, prepared, after = (in_process(step, source, folder / "raw", patients) for step in steps)
        shutil.rmtree(folder / "out")
        more = {}
        if source == "iiic":
            more["plain copy: seconds"] = in_process("copy", source, folder / "raw", patients)["seconds"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wall, cpu = ((before[key] + after[key]) / 2 for key in ("seconds", "cpu_seconds"))
    return {
        "raw files, GB": made["counts"]["bytes"] / 1e9,
        "read": before["counts"],
        "samples": prepared["counts"]["samples"],
        "prepare: seconds": prepared["seconds"],
        "prepare: processor seconds": prepared["cpu_seconds"],
        "read: seconds": wall,
        "read: processor seconds": cpu,
        "ratio by the clock": prepared["seconds"] / max(wall, 0.01),
        "ratio by processor": prepared["cpu_seconds"] / max(cpu, 0.01),
        "peak memory, GiB": prepared["peak_gib"],
    } | more


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sources", description=__doc__.split("\n\n")[0])
    parser.add_argument("--scale", type=float, default=0.05, help="1 is the size of the real datasets")
    parser.add_argument("--sources", nargs="+", default=list(FULL), choices=list(FULL))
    parser.add_argument("--temporary", type=Path, help="where the twins are written and deleted again")
    for name, kind in (("--step", str), ("--raw", Path), ("--patients", int)):
        parser.add_argument(name, help=argparse.SUPPRESS, type=kind)
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps(measured_step(arguments.step, arguments.sources[0], arguments.raw, arguments.patients)))
        return
    for source in arguments.sources:
        for what, value in measure(source, arguments.scale, arguments.temporary).items():
            print(f"{source:10s}{what:28s}{f'{value:.2f}' if isinstance(value, float) else value}", flush=True)


if __name__ == "__main__":
    main()
