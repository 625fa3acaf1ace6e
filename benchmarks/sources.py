"""Preparing recordings and tables against merely reading the same files, on synthetic twins of any size.

    python -m benchmarks.sources --scale 1 --temporary /big/disk

At scale 1 the twins have the size of the originals: 4.1 million prescriptions, 39 million laboratory rows, 153 nights
of 20 hours, 165,000 samples of 16 x 2000, which need 42 GB of disk while it runs, and a BIDS dataset of 109 people, two
minutes of 64 channels at 160 Hz each. Each step runs in a process of its own, so that its peak memory is its own.
"Reading" counts the cells of the needed columns with polars' streaming engine, the finite values of the arrays with
numpy, or reads the two channels, or all 64, with edfio.

Both are measured twice over: from the disk, for which the raw files are dropped from the file cache before each step
(what a small machine does with files larger than its memory), and from the cache, as far as they stay there. Reading is
done before preparing and after it, and the mean of the two is what preparing is compared with. A plain copy of the
arrays is timed too, which is what preparing them cannot do without, less the checksums.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FULL = {"mimic3": 41_000, "eicu": 144_500, "sleep-edf": 78, "iiic": 2_702, "edf": 109}
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
# The first rows of a small twin may all be numbers here, from which polars would conclude that the others are.
TEXTS = {"labresulttext"}
MORE: dict[str, dict[str, Any]] = {
    "iiic": {"samples_per_patient": 63},
    "edf": {"channels": 64, "rate": 160, "minutes": 2, "recordings": 1},
}
ROWS_AT_ONCE = 128
PROBES = 16


def synthesize(source: str, raw: Path, patients: int) -> dict[str, int]:
    from manydg import sources

    sources.synthesize(source, raw, patients=patients, seed=0, **MORE.get(source, {}))
    return {"bytes": sum(path.stat().st_size for path in raw.rglob("*") if path.is_file())}


def read(source: str, raw: Path) -> dict[str, int]:
    """Merely read what preparing needs; returns how much it was."""
    if source in ("edf", "sleep-edf"):
        return _read_edf(raw, ("EEG Fpz-Cz", "EEG Pz-Oz") if source == "sleep-edf" else None)
    if source == "iiic":
        return {"values": sum(_count_finite(raw / name) for name in ("signals.npy", "votes.npy"))}
    import polars as pl

    rows = {}
    for name, columns in COLUMNS[source].items():
        path = next(raw.glob(f"{name}.csv*"))
        table = pl.scan_csv(path, schema_overrides={name: pl.String for name in columns if name in TEXTS})
        counts = table.select(pl.len().alias("rows"), pl.col(columns).count()).collect(engine="streaming")
        rows[name] = int(counts["rows"].item())
    return rows


def _read_edf(raw: Path, labels: tuple[str, ...] | None) -> dict[str, int]:
    """Read some channels of every recording, or all of them."""
    import edfio

    recordings = sorted(path for path in raw.rglob("*.edf") if not path.name.endswith("-Hypnogram.edf"))
    for path in recordings:
        recording = edfio.read_edf(path)
        for label in labels or recording.labels:
            assert len(recording.get_signal(label).data)
    return {"recordings": len(recordings)}


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
    from manydg import sources
    from manydg.data.storage import read_description

    needs = {"ndc_map": raw / "ndc_to_atc.csv"} if source == "mimic3" else {}
    out = sources.prepare(source, raw, raw.with_name("out"), **needs)
    description = read_description(out)
    return {"samples": description.samples, "patients": description.patients}


def drop_from_cache(raw: Path) -> None:
    """Have the operating system forget what it holds of the files, so that they are read from the disk (Linux only)."""
    for path in _files(raw):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def share_in_cache(raw: Path) -> float:
    """Which part of the files' bytes can be had without the disk, from a few probes in each; not known: NaN."""
    if not hasattr(os, "RWF_NOWAIT"):
        return math.nan
    held = total = 0.0
    for path in _files(raw):
        size = path.stat().st_size
        probes = range(0, size, max(1 << 16, size // PROBES))
        with path.open("rb", buffering=0) as file:
            found = sum(_is_cached(file.fileno(), at) for at in probes)
        held, total = held + size * found / max(1, len(probes)), total + size
    return held / max(1.0, total)


def _is_cached(file: int, at: int) -> bool:
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False


def _files(raw: Path) -> list[Path]:
    return [path for path in raw.rglob("*") if path.is_file()]


def measured_step(step: str, source: str, raw: Path, patients: int) -> dict[str, Any]:
    """What a process of its own does; imports take the same time at any size and are not counted."""
    from manydg.sources import find_source, find_twin

    find_source(source), find_twin(source)
    cached = share_in_cache(raw)
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
        "cached": round(cached, 2),
        "load": round(os.getloadavg()[0], 1),
        "counts": counts,
    }


@dataclass(frozen=True)
class Bench:
    """The steps of one source, each in a process of its own, on files in ``folder``."""

    source: str
    folder: Path
    patients: int

    def cold(self, step: str) -> dict[str, Any]:
        """A step that has to read the raw files from the disk."""
        drop_from_cache(self.folder / "raw")
        return self.run(step)

    def run(self, step: str) -> dict[str, Any]:
        """A step that finds in the file cache what the one before it left there."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks.sources", "--step", step, "--sources", self.source]
        command += ["--raw", str(self.folder / "raw"), "--patients", str(self.patients)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
        if done.returncode:
            raise RuntimeError(f"{self.source}, {step}: {done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print(f"{self.source:10s}{step:11s}{json.dumps(result)}", flush=True)
        return result


def measure(source: str, scale: float, temporary: Path | None) -> dict[str, Any]:
    """Synthesize, then read, prepare and read again, from the disk and from the cache; all is deleted in the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"manydg-{source}-", dir=temporary))
    bench = Bench(source, folder, max(2, round(FULL[source] * scale)))
    try:
        made = bench.run("synthesize")
        disk = [bench.cold("read"), bench.cold("prepare"), bench.cold("read")]
        cache = [bench.run("read"), bench.run("prepare"), bench.run("read")]
        more = {"plain copy: seconds": bench.cold("copy")["seconds"]} if source == "iiic" else {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "raw files, GB": made["counts"]["bytes"] / 1e9,
        "read": disk[0]["counts"],
        "samples": disk[1]["counts"]["samples"],
        **_compare("disk", *disk),
        **_compare("cache", *cache),
        **more,
        "peak memory, GiB": max(disk[1]["peak_gib"], cache[1]["peak_gib"]),
    }


def _compare(where: str, before: dict[str, Any], prepared: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, by in (("seconds", "clock"), ("cpu_seconds", "processor")):
        reading = (before[key] + after[key]) / 2
        found |= {
            f"{where}, {by}: prepare, s": prepared[key],
            f"{where}, {by}: read, s": reading,
            f"{where}, {by}: ratio": prepared[key] / max(reading, 0.01),
        }
    return found


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
            print(f"{source:10s}{what:32s}{f'{value:.2f}' if isinstance(value, float) else value}", flush=True)


if __name__ == "__main__":
    main()
