"""What the command shows while it works."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from manydg.errors import QUIET, printable

if TYPE_CHECKING:
    from rich.console import Group

    from manydg.files import Json
    from manydg.studies.study import Board, PlannedRun, Study
    from manydg.studies.tuning import Search, Trial
    from manydg.training.record import EpochEntry, RunRecord


class PlainConsole(Console):
    """A console that shows text as it is: brackets are no markup, and nothing in a name moves the cursor.

    Strings are escaped (:func:`manydg.errors.printable`), so that each is one line; whoever builds a table escapes its
    cells.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, width=width, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)

    def print(self, *objects: object, **options: Any) -> None:
        if self.stderr and QUIET in os.environ:
            return
        super().print(*(printable(entry) if isinstance(entry, str) else entry for entry in objects), **options)


console = PlainConsole(stderr=True, soft_wrap=True)


def show_line(text: str) -> None:
    """Print one line of a command's answer."""
    print(printable(text))


def show_json(value: Json) -> None:
    """Print a command's answer as JSON."""
    print(printable(json.dumps(value, ensure_ascii=True)))


class EpochLines:
    """One line per epoch, or per some rounds of boosting: the loss terms and the validation metrics."""

    def started(self, algorithm: str, epochs: int, first_epoch: int) -> None:
        from manydg.algorithms import ALGORITHMS

        self.epochs = epochs
        self.unit = "round" if ALGORITHMS.get(algorithm).sampling == "whole" else "epoch"
        going_on = f", going on from epoch {first_epoch}" if first_epoch > 1 else ""
        console.print(f"training {algorithm}{going_on}")

    def epoch_ended(self, entry: EpochEntry) -> None:
        losses, metrics = figures(entry.losses), figures(entry.val)
        console.print(f"{self.unit} {entry.epoch:>3}/{self.epochs}  loss: {losses}  validation: {metrics}")

    def finished(self, record: RunRecord) -> None:
        pass


def study_board() -> Board:
    """A live table where somebody is watching, and plain lines where the output goes to a file."""
    return LiveBoard() if console.is_terminal and QUIET not in os.environ else RunLines()


class RunLines:
    """One line per run of a study, with the time left."""

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None:
        self.expect(len(runs), done, "runs")

    def expect(self, total: int, done: int, what: str) -> None:
        """Begin to count."""
        self.total, self.done, self.start, self.before = total, done, time.perf_counter(), done
        if done:
            console.print(f"{done} of {total} {what} are done already")

    def run_started(self, run: PlannedRun, status: Path) -> None:
        pass

    def run_ended(self, run: PlannedRun, record: RunRecord) -> None:
        self.done += 1
        console.print(f"{self.mark}  {described(run)}:  {outcome(record)}")

    def ended(self) -> None:
        pass

    @property
    def mark(self) -> str:
        """How far it is."""
        return f"[{self.done:>3}/{self.total}, {clock(self.left)} left]"

    @property
    def left(self) -> float:
        """Seconds left, if the runs to come take as long as those since the start."""
        if self.done == self.before:
            return float("nan")
        each = (time.perf_counter() - self.start) / (self.done - self.before)
        return each * (self.total - self.done)


class TrialLines:
    """One line per trial of a search, with the time left."""

    def planned(self, total: int, done: int) -> None:
        self.clock = RunLines()
        self.clock.expect(total, done, "trials")

    def ended(self, search: Search, trial: Trial) -> None:
        self.clock.done += 1
        metric, best = search.base.selection, search.chosen
        if trial.state == "failed":
            how = f"failed: {trial.error}"
        else:
            how = f"validation {metric} {trial.score:.4f}"
            how += f", stopped after epoch {trial.epochs}" if trial.state == "pruned" else ""
        so_far = "" if best is None else f" (best {best.score:.4f}, trial {best.number})"
        console.print(f"{self.clock.mark}  {search.name} trial {trial.number}:  {how}{so_far}")


class LiveBoard(RunLines):
    """A table of the runs under way with their epochs and losses, under one line for each run that ended."""

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None:
        from rich.live import Live

        super().planned(runs, done)
        self.under_way: dict[int, tuple[PlannedRun, Path]] = {}
        self.live = Live(get_renderable=self.table, console=console, refresh_per_second=2, transient=True)
        self.live.start()

    def run_started(self, run: PlannedRun, status: Path) -> None:
        self.under_way[id(run)] = (run, status)

    def run_ended(self, run: PlannedRun, record: RunRecord) -> None:
        self.under_way.pop(id(run), None)
        super().run_ended(run, record)

    def ended(self) -> None:
        self.live.stop()

    def table(self) -> Group:
        """What is under way now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        from manydg.studies.records import read_status

        table = Table("experiment", "run", "epoch", "loss", "validation", box=None, pad_edge=False)
        for run, file in list(self.under_way.values()):
            status = read_status(file)
            epoch = f"{status.epoch}/{status.epochs or run.config.epochs}"
            cells = [run.experiment, described(run), epoch, figures(status.losses), figures(status.val)]
            table.add_row(*(Text(printable(cell)) for cell in cells))
        left = clock(self.left) if self.left == self.left else "unknown time"
        counts = Text(f"{self.done} of {self.total} runs done, {left} left")
        return Group(table, ProgressBar(total=max(1, self.total), completed=self.done), counts)


def show_plan(study: Study, workers: int) -> None:
    """List a study's runs, what is done of them, and how long the rest will take."""
    from manydg.studies.study import plan_study

    plan = plan_study(study)
    for run, done in zip(plan.runs, plan.done, strict=True):
        show_line(f"{'done' if done else 'to do':>6}  {run.experiment}  {described(run)}")
    side_by_side = min(workers, max(1, plan.done.count(False)))
    if plan.seconds is None:
        guess = "how long they take is not known before the first of their kind is done"
    else:
        guess = f"about {clock(plan.seconds / side_by_side)} with {side_by_side} at a time"
    show_line(f"{study.name}: {len(plan.runs)} runs, {sum(plan.done)} done already; the rest: {guess}")


def described(run: PlannedRun) -> str:
    """A run in a few words."""
    variant = (value if isinstance(value, str) else f"{name} {value}" for name, value in run.variant.items())
    return ", ".join([f"{run.config.algorithm} seed {run.config.seed}", *variant])


def outcome(record: RunRecord) -> str:
    """How a run ended."""
    if record.ok:
        return figures(record.headline)
    lines = (record.error or "no reason given").strip().splitlines()
    return f"failed: {lines[-1]}"


def figures(values: Mapping[str, float | None]) -> str:
    """Names and numbers in a row; those that are undefined are left out."""
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items() if value is not None)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    Examples
    --------
    >>> clock(3725), clock(59.6)
    ('1:02:05', '1:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
