"""IIIC seizure patterns: ten-second EEG samples with the votes of several experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data.dataset import TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError
from manydg.sources._iiic_parts import CHANNELS, RATE, Part, find_parts, open_signals, read_patients, read_votes
from manydg.sources._iiic_reading import PartReading, PlannedReading, plan_part, verdicts_in
from manydg.sources._iiic_rules import CLASSES, FEW_VOTES, FLAT, KEPT, LOUD, NOT_FINITE, Rules
from manydg.sources._predict_iiic import prepare_for_prediction
from manydg.sources._provenance import CohortFlow, Progress, provenance
from manydg.sources._resume import WorkFolder, make_ready, run_jobs, wrong_folder
from manydg.sources._spread import Job, spreads
from manydg.sources._twin_iiic import synthesize

__all__ = ["prepare", "prepare_for_prediction", "synthesize"]

SETTINGS = {"rate": RATE, "channels": list(CHANNELS), "unit": "uV"}
_LIMITED = 9


def prepare(
    raw: Path,
    out: Path,
    *,
    workers: int = 1,
    limit_patients: int | None = None,
    overwrite: bool = False,
    min_votes: int = 5,
    unvoted: str = "refuse",
    max_amplitude: float | None = None,
    flat_below: float | None = None,
    scale: float = 1.0,
    vote_order: Sequence[str] = CLASSES,
) -> Path:
    """Make a dataset folder from arrays of signals, votes and patient keys.

    The column ``signal`` is ``(rows, 16, 2000)`` float32 in microvolts; the targets are vote counts over six classes.

    Parameters
    ----------
    raw : path
        Holds ``signals.npy`` ``(rows, 16, 2000)``, ``votes`` ``(rows, 6)`` and ``patients`` ``(rows,)`` as ``.npy`` or
        ``.csv``; or several such sets, in subfolders or with a common prefix (``training_signals.npy``). A set without
        a file of patients belongs to the one patient it is named after.
    min_votes : int
        Samples with fewer votes are left out (the paper: five).
    unvoted : {"refuse", "skip"}
        What to do about a row without a single vote.
    max_amplitude : float, optional
        Artefact filter: leave out samples that exceed so many microvolts anywhere.
    flat_below : float, optional
        Artefact filter: leave out samples in which a channel's standard deviation is under so many microvolts.
    scale : float
        Microvolts per unit of the stored signals.
    vote_order : sequence of str
        Which class each column of the votes is, where the file does not say.
    """
    raw, out = Path(raw).absolute(), Path(out)
    rules = Rules(min_votes, unvoted, scale, max_amplitude, flat_below, tuple(vote_order))
    if limit_patients is not None and limit_patients < 1:
        raise ConfigError(f"the limit on patients must be 1 or more, not {limit_patients}")
    make_ready(out, overwrite=overwrite)
    parts = find_parts(raw)
    if not parts:
        raise wrong_folder(raw, "IIIC arrays (signals.npy, votes.npy, patients.npy)")
    work = WorkFolder(out, "iiic", asdict(rules))
    jobs = [Job(part.name, part.files, (part, rules)) for part in parts]
    patients = [_check_part(part, rules) for part in parts]
    if spreads(workers):
        run_jobs(plan_part, jobs, work, workers=workers, title="checking samples")
    chosen = None if limit_patients is None else np.unique(np.concatenate(patients))[:limit_patients]
    with DatasetWriter(
        out, TargetSpec("votes", CLASSES), {"settings": SETTINGS | {"scale": scale}}, overwrite=overwrite
    ) as writer:
        plans = _copy(writer, jobs, patients, chosen, work)
        limited = [_limit(verdicts_in(plan), keys, chosen) for plan, keys in zip(plans, patients, strict=True)]
        flow = _flow(np.concatenate(limited), np.concatenate(patients), rules)
        options = asdict(rules) | {"vote_order": list(rules.vote_order), "limit_patients": limit_patients}
        files = [entry for plan in plans for entry in plan["files"]]
        writer.info |= provenance("iiic", files, options, flow)
    work.remove()
    return out


def _check_part(part: Part, rules: Rules) -> npt.NDArray[np.str_]:
    """Whose each row is, once the part's files are known to fit together."""
    rows = len(open_signals(part))
    read_votes(part, rows, rules)
    return read_patients(part, rows)


def _limit(
    verdicts: npt.NDArray[np.uint8], keys: npt.NDArray[np.str_], chosen: npt.NDArray[np.str_] | None
) -> npt.NDArray[np.uint8]:
    return verdicts if chosen is None else np.where(np.isin(keys, chosen), verdicts, _LIMITED).astype(np.uint8)


def _flow(verdicts: npt.NDArray[np.uint8], patients: npt.NDArray[np.str_], rules: Rules) -> CohortFlow:
    flow = CohortFlow()
    left = np.ones(len(verdicts), bool)
    flow.add("samples found", patients=len(np.unique(patients)), samples=len(verdicts))
    steps = {
        "limit on patients": _LIMITED,
        f"at least {rules.min_votes} votes": FEW_VOTES,
        "finite signal": NOT_FINITE,
    }
    if rules.flat_below is not None:
        steps[f"no channel flat (under {rules.flat_below:g} uV)"] = FLAT
    if rules.max_amplitude is not None:
        steps[f"amplitude up to {rules.max_amplitude:g} uV"] = LOUD
    for step, reason in steps.items():
        if reason == _LIMITED and not (verdicts == _LIMITED).any():
            continue
        dropped = verdicts == reason
        left &= ~dropped
        flow.add(step, patients=len(np.unique(patients[left])), samples=int(left.sum()), left_out=int(dropped.sum()))
    return flow


def _copy(
    writer: DatasetWriter,
    jobs: Sequence[Job],
    patients: Sequence[npt.NDArray[np.str_]],
    chosen: npt.NDArray[np.str_] | None,
    work: WorkFolder,
) -> list[dict[str, Any]]:
    """Write the samples, a block at a time; a part that is not planned yet is planned by the way. Returns the plans."""
    plans = []
    with Progress("copying signals", total=sum(map(len, patients))) as progress:
        for job, keys in zip(jobs, patients, strict=True):
            part, rules = job.argument
            votes = read_votes(part, len(keys), rules)
            plan = work.load(job)
            reading = PartReading(part, rules) if plan is None else PlannedReading(part, plan)
            for rows, stored, verdicts in reading.blocks():
                kept = _limit(verdicts, keys[rows], chosen) == KEPT
                if kept.any():
                    signal = _microvolts(stored, kept, rules)
                    writer.append_lasting({"signal": signal}, votes[rows][kept], keys[rows][kept])
                progress.advance(len(kept))
            plans.append(reading.plan())
            if plan is None:
                work.save(job, plans[-1])
    return plans


def _microvolts(stored: npt.NDArray[Any], kept: npt.NDArray[np.bool_], rules: Rules) -> npt.NDArray[np.float32]:
    values = np.asarray(stored if kept.all() else stored[kept], np.float32)
    return values if rules.scale == 1.0 else values * np.float32(rules.scale)
