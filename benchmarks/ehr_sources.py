"""Preparing MIMIC-III and eICU against merely scanning the same files with polars, on synthetic twins of the real size.

    python benchmarks/ehr_sources.py --scale 0.1

Each step runs in a process of its own, so that its peak memory is its own. "Scanning" reads the columns that
``prepare`` needs from every table and counts their cells, with polars' streaming engine.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FULL = {"mimic3": 41_000, "eicu": 144_500}
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


def synthesize(source: str, folder: Path, patients: int, ending: str) -> None:
    from manydg.sources import eicu, mimic3

    {"mimic3": mimic3, "eicu": eicu}[source].synthesize(folder / "raw", patients=patients, seed=0, ending=ending)


def scan(source: str, folder: Path) -> dict[str, int]:
    import polars as pl

    rows = {}
    for name, columns in COLUMNS[source].items():
        path = next((folder / "raw").glob(f"{name}.csv*"))
        counts = pl.scan_csv(path).select(pl.len().alias("rows"), pl.col(columns).count()).collect(engine="streaming")
        rows[name] = counts["rows"].item()
    return rows


def prepare(source: str, folder: Path) -> dict[str, int]:
    from manydg.data.storage import read_description
    from manydg.sources import eicu, mimic3

    if source == "mimic3":
        out = mimic3.prepare(folder / "raw", folder / "out", ndc_map=folder / "raw" / "ndc_to_atc.csv")
    else:
        out = eicu.prepare(folder / "raw", folder / "out")
    description = read_description(out)
    return {name: description[name] for name in ("samples", "patients")}


def step(arguments: argparse.Namespace) -> None:
    """One step, measured: what the subprocess does. Imports take the same time at any size and are not counted."""
    import manydg.sources.eicu
    import manydg.sources.mimic3  # noqa: F401

    began, used = time.perf_counter(), time.process_time()
    if arguments.step == "synthesize":
        synthesize(arguments.source, arguments.folder, arguments.patients, arguments.ending)
        counts: dict[str, int] = {}
    else:
        counts = {"scan": scan, "prepare": prepare}[arguments.step](arguments.source, arguments.folder)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    measured = {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - used, 2),
        "peak_mb": usage.ru_maxrss // 1024,
    }
    print(json.dumps(measured | {"counts": counts}))


def run(name: str, source: str, folder: Path, patients: int, ending: str) -> dict:
    command = [sys.executable, __file__, "--step", name, "--source", source, "--folder", str(folder)]
    command += ["--patients", str(patients), "--ending", ending]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{source}, {name}: {done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{source:7s} {name:10s} {json.dumps(result)}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=0.1, help="1 is the size of the real databases")
    parser.add_argument("--sources", nargs="+", default=list(FULL), choices=list(FULL))
    parser.add_argument("--ending", default=".csv.gz", choices=[".csv.gz", ".csv"])
    parser.add_argument("--temporary", type=Path, help="where the twins are written and deleted again")
    for name in ("--step", "--source", "--folder", "--patients"):
        parser.add_argument(name, help=argparse.SUPPRESS, type=Path if name == "--folder" else None)
    arguments = parser.parse_args()
    if arguments.step:
        arguments.patients = int(arguments.patients)
        step(arguments)
        return
    for source in arguments.sources:
        folder = Path(tempfile.mkdtemp(prefix=f"manydg-{source}-", dir=arguments.temporary))
        try:
            patients = max(2, round(FULL[source] * arguments.scale))
            run("synthesize", source, folder, patients, arguments.ending)
            run("scan", source, folder, patients, arguments.ending)  # once to fill the file cache
            scanned = run("scan", source, folder, patients, arguments.ending)
            prepared = run("prepare", source, folder, patients, arguments.ending)
            print(
                f"{source:7s} prepare / scan: {prepared['seconds'] / scanned['seconds']:.2f} (wall), "
                f"{prepared['cpu_seconds'] / scanned['cpu_seconds']:.2f} (processor), "
                f"peak {prepared['peak_mb'] / 1024:.2f} GiB",
                flush=True,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
