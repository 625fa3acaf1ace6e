"""Sleep-EDF (PhysioNet sleep-edfx): PSG and Hypnogram pairs to 30 s epochs with a sleep stage each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data.dataset import TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError
from manydg.sources._edf import read_epochs
from manydg.sources._provenance import (
    CohortFlow,
    Progress,
    describe_files,
    hashed_meanwhile,
    map_whole,
    provenance,
)
from manydg.sources._resume import WorkFolder, make_ready, run_jobs, wrong_folder
from manydg.sources._sleep_night import (
    CHANNELS,
    EPOCH_SAMPLES,
    EPOCH_SECONDS,
    RATE,
    STAGES,
    Found,
    Night,
    check_recording,
    describe_night,
    find_nights,
    night_offsets,
    plan_night,
)
from manydg.sources._spread import Job, spreads
from manydg.sources._twin_sleep import synthesize

__all__ = ["prepare", "synthesize"]

_BLOCK = 128
SETTINGS = {"rate": RATE, "channels": list(CHANNELS), "unit": "uV", "epoch_seconds": EPOCH_SECONDS}


def prepare(
    raw: Path,
    out: Path,
    *,
    workers: int = 1,
    limit_patients: int | None = None,
    overwrite: bool = False,
    wake_margin: float | None = None,
    study: str = "cassette",
    unpaired: str = "refuse",
) -> Path:
    """Make a dataset folder from Sleep-EDF's files.

    The column ``signal`` is ``(rows, 2, 3000)`` float32 in microvolts (Fpz-Cz, Pz-Oz); the target is one of five stages
    (N3 is stages 3 and 4); a person's nights are one patient. Only the two channels are read.

    Parameters
    ----------
    raw : path
        A folder with ``SC4ssNE0-PSG.edf`` and ``SC4ssNEC-Hypnogram.edf`` pairs (or ``ST7...``), at any depth.
    out : path
    workers : int
        Processes that check and score the nights.
    limit_patients : int, optional
        Take only the first so many people.
    wake_margin : float, optional
        Keep this many minutes of wakefulness before the first and after the last sleep epoch; without it, all.
    study : {"cassette", "telemetry", "both"}
    unpaired : {"refuse", "skip"}
        What to do about a PSG without its hypnogram, or the reverse.
    """
    raw, out = Path(raw).absolute(), Path(out)
    _check_options(wake_margin, limit_patients, unpaired)
    make_ready(out, overwrite=overwrite)
    found = find_nights(raw, study)
    _check_found(raw, found, study, unpaired)
    nights = limit(found.nights, limit_patients)
    options = {"study": study, "wake_margin": wake_margin, "limit_patients": limit_patients, "unpaired": unpaired}
    work = WorkFolder(out, "sleep-edf", {"wake_margin": wake_margin})
    jobs = [Job(night.name, (night.psg, night.hypnogram), (night, wake_margin)) for night in nights]
    plans = run_jobs(plan_night, jobs, work, workers=workers, title="checking nights")
    sums = [Job(f"checksums of {night.name}", (night.psg, night.hypnogram), night) for night in nights]
    if spreads(workers):
        run_jobs(describe_night, sums, work, workers=workers, title="checksums")
    with DatasetWriter(out, TargetSpec("classes", STAGES), {"settings": SETTINGS}, overwrite=overwrite) as writer:
        files = _copy(writer, sums, plans, work)
        writer.info |= provenance("sleep-edf", files, options, _flow(found, nights, plans, wake_margin))
    work.remove()
    return out


def _check_options(wake_margin: float | None, limit_patients: int | None, unpaired: str) -> None:
    if wake_margin is not None and not 0 <= wake_margin < 10_000:
        raise ConfigError(f"the wake margin is a number of minutes, 0 or more; not {wake_margin:g}")
    if limit_patients is not None and limit_patients < 1:
        raise ConfigError(f"the limit on patients must be 1 or more, not {limit_patients}")
    if unpaired not in ("refuse", "skip"):
        raise ConfigError(f"unpaired files can be met with 'refuse' or 'skip', not '{unpaired}'")


def _check_found(raw: Path, found: Found, study: str, unpaired: str) -> None:
    if not found.nights and not found.unpaired:
        if study != "both" and find_nights(raw, "both").nights:
            raise ConfigError(f"{raw} holds no {study} recordings, but others of Sleep-EDF: ask for '--study both'")
        raise wrong_folder(raw, "Sleep-EDF files (SC4001E0-PSG.edf, SC4001EC-Hypnogram.edf, ...)")
    if found.unpaired and unpaired == "refuse":
        first = found.unpaired[0]
        part, other = ("PSG", "Hypnogram") if "psg" in first.name.lower() else ("Hypnogram", "PSG")
        raise DataError(
            f"{first.name} is a {part} without its {other} ({len(found.unpaired)} such files in {raw}): "
            "download the missing files, or leave these out with '--unpaired skip'"
        )
    if not found.nights:
        raise DataError(f"{raw} holds not one pair of a PSG and its Hypnogram")


def limit(nights: Sequence[Night], patients: int | None) -> tuple[Night, ...]:
    """The nights of the first so many people."""
    chosen = list(dict.fromkeys(night.patient for night in nights))[:patients]
    return tuple(night for night in nights if night.patient in set(chosen))


def _flow(
    found: Found, nights: Sequence[Night], plans: Sequence[Mapping[str, Any]], wake_margin: float | None
) -> CohortFlow:
    def people(nights: Sequence[Night]) -> int:
        return len({night.patient for night in nights})

    def total(reason: str) -> int:
        return sum(int(plan["counts"][reason]) for plan in plans)

    flow = CohortFlow()
    pairs, alone = len(found.nights), len(found.unpaired)
    flow.add("recordings with a hypnogram", patients=people(found.nights), recordings=pairs, left_out=alone)
    if len(nights) < pairs:
        flow.add("limit on patients", patients=people(nights), recordings=len(nights), left_out=pairs - len(nights))
    left = total("overlap")
    outside = total("signal_without_hypnogram")
    flow.add("30 s epochs with signal and hypnogram", patients=people(nights), samples=left, left_out=outside)
    steps = {"without movement time": "movement", "with a stage": "unscored"}
    if wake_margin is not None:
        steps[f"within {wake_margin:g} minutes of sleep"] = "outside_margin"
    for step, reason in steps.items():
        left -= total(reason)
        flow.add(step, patients=people(nights), samples=left, left_out=total(reason))
    flow.add("samples", patients=_people_left(nights, plans), samples=left)
    return flow


def _people_left(nights: Sequence[Night], plans: Sequence[Mapping[str, Any]]) -> int:
    return len({night.patient for night, plan in zip(nights, plans, strict=True) if plan["epochs"]})


def _copy(
    writer: DatasetWriter, jobs: Sequence[Job], plans: Sequence[Mapping[str, Any]], work: WorkFolder
) -> list[dict[str, Any]]:
    """Write the chosen epochs, a night at a time.

    A night whose checksums are not known yet is hashed while its epochs are written, so that it is read once.

    Returns
    -------
    list of dict
        Name, size and checksum of every file.
    """
    nights = [job.argument for job in jobs]
    files: list[dict[str, Any]] = []
    with Progress("copying signals", total=len(nights)) as progress:
        for job, plan, offset in zip(jobs, plans, night_offsets(nights, plans), strict=True):
            night, known = job.argument, work.load(job)
            if known is None:
                content = map_whole(night.psg)
                digest = hashlib.sha256()
                with hashed_meanwhile(digest, content.data):
                    _copy_night(writer, night, plan, offset, content)
                entry = {"name": night.psg.name, "bytes": len(content), "checksum": digest.hexdigest()}
                known = [entry, *describe_files([night.hypnogram])]
                work.save(job, known)
            else:
                _copy_night(writer, night, plan, offset, None)
            files.extend(known)
            progress.advance()
    return files


def _copy_night(
    writer: DatasetWriter,
    night: Night,
    plan: Mapping[str, Any],
    offset: float,
    content: npt.NDArray[np.uint8] | None,
) -> None:
    kept, stages = np.asarray(plan["epochs"], np.int64), np.asarray(plan["stages"], np.int64)
    header = check_recording(night.psg)
    channels = [header.find(label) for label in CHANNELS]
    # A few megabytes at a time stay in the processor's cache between reading, hashing and writing.
    for start in range(0, len(kept), _BLOCK):
        part = slice(start, start + _BLOCK)
        signal = read_epochs(header, channels, kept[part], EPOCH_SAMPLES, content)
        times = kept[part] * float(EPOCH_SECONDS) + offset
        writer.append_lasting({"signal": signal}, stages[part], [night.patient] * len(signal), times)
