"""What the command shows while it works."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from manydg.experiments.study import PlannedRun

# Without markup and wrapping, so that brackets in a path or a message stay as they are and each message is one line.
console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


class EpochLines:
    """One line per epoch: the loss terms and the validation metrics."""

    def started(self, algorithm: str, epochs: int, first_epoch: int) -> None:
        self.epochs = epochs
        going_on = f", going on from epoch {first_epoch}" if first_epoch > 1 else ""
        console.print(f"training {algorithm}{going_on}")

    def epoch_ended(self, entry: Mapping[str, Any]) -> None:
        losses = "  ".join(f"{name} {value:.4f}" for name, value in entry["losses"].items())
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in entry["val"].items() if value is not None)
        console.print(f"epoch {entry['epoch']:>3}/{self.epochs}  loss: {losses}  validation: {metrics}")

    def finished(self, record: Mapping[str, Any]) -> None:
        pass


class RunLines:
    """One line per run of a study, with the time left."""

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None:
        self.total, self.done, self.start, self.before = len(runs), done, time.perf_counter(), done
        if done:
            console.print(f"{done} of {len(runs)} runs are done already")

    def run_started(self, run: PlannedRun) -> None:
        pass

    def run_ended(self, run: PlannedRun, record: Mapping[str, Any]) -> None:
        self.done += 1
        each = (time.perf_counter() - self.start) / (self.done - self.before)
        left = each * (self.total - self.done)
        what = " ".join(
            [run.config.algorithm, f"seed {run.config.seed}", *(f"{k}={v}" for k, v in run.variant.items())]
        )
        if record["status"] == "ok":
            outcome = "  ".join(f"{name} {value:.4f}" for name, value in record["test"].items() if value is not None)
        else:
            outcome = "failed: " + record["error"].strip().splitlines()[-1]
        console.print(f"[{self.done:>3}/{self.total}, {_clock(left)} left]  {what}:  {outcome}")


def show_plan(runs: Sequence[PlannedRun], out: Path, dataset: Path, workers: int) -> None:
    """List planned runs with what is known of their cost from runs of the same algorithm already in the folder."""
    from manydg.experiments.study import estimate_seconds, finished_runs

    done = finished_runs(out, dataset, runs)
    seconds = estimate_seconds(out, [run for run in runs if run not in done])
    for run in runs:
        variant = " ".join(f"{name}={value}" for name, value in run.variant.items())
        state = "done" if run in done else "to do"
        console.print(
            f"{state:>6}  {run.experiment}  {run.config.algorithm}  seed {run.config.seed}  {variant}", markup=False
        )
    guess = f"about {_clock(seconds / workers)}" if seconds is not None else "time unknown until a first run is done"
    console.print(f"{len(runs)} runs, {len(done)} done already; {guess}")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
