"""Kill commands at random moments, run them again, and compare with commands that nobody disturbed.

    python -m tests.soak.kills --kills 300 --seed 1

Every command gets small data of its own. One start in five is of a fresh interpreter; the others are forked from a
process that has imported what commands import. After one or several kills in a row the
command is run to its end: what it has then written, hidden and temporary files included, must be what the undisturbed
command wrote, and no child may have outlived its parent.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from tests.soak.processes import LIBRARIES, PACKAGE, Process, Server, start_fresh
from tests.soak.results import contents

FRESH_SHARE = 0.2
AGAIN_SHARE = 0.75
"""The chance that a killed command is killed once more before it may end."""
LIMIT = 600.0
PROGRESS = 50
ORPHAN_SECONDS = 15.0
TABLE = ("--patient", "patient", "--target", "stage", "--features", "f*")
SMALL = ("--epochs", "1", "--batch-size", "32")


@dataclass(frozen=True)
class Case:
    """A command, run in a folder of its own two levels below that of the inputs.

    Attributes
    ----------
    weight : float
        How often it is killed, relative to the others: commands that take long are killed less often.
    before : tuple of str
        A command that is run in the folder first, whose result the command replaces.
    """

    name: str
    arguments: tuple[str, ...]
    weight: float = 1.0
    before: tuple[str, ...] = ()


def _case(name: str, command: str, weight: float = 1.0, before: str = "") -> Case:
    words = {"TABLE": TABLE, "SMALL": SMALL}

    def split(text: str) -> tuple[str, ...]:
        return tuple(part for word in text.split() for part in words.get(word, (word,)))

    return Case(name, split(command), weight, split(before))


IN = "../../inputs"
CASES = (
    _case("prepare table", f"prepare table {IN}/table.csv TABLE --out out"),
    _case(
        "prepare table --overwrite",
        f"prepare table {IN}/table.csv TABLE --out out --overwrite",
        before=f"prepare table {IN}/other.csv TABLE --out out",
    ),
    _case("prepare arrays", f"prepare arrays --x {IN}/x.npy --y {IN}/y.npy --patient {IN}/who.npy --out out"),
    _case("prepare sleep-edf", f"prepare sleep-edf {IN}/raw-sleep --out out"),
    _case("prepare mimic3", f"prepare mimic3 {IN}/raw-mimic --ndc-map {IN}/raw-mimic/ndc_to_atc.csv --out out"),
    _case("prepare meds", f"prepare meds {IN}/raw-meds --labels {IN}/raw-meds/labels/readmission.parquet --out out"),
    _case("synthesize sleep-edf", "synthesize sleep-edf --patients 2 --nights 1 --hours 1 --out out", 0.5),
    _case("synthesize mimic3", "synthesize mimic3 --patients 30 --out out", 0.5),
    _case("train", f"train {IN}/table --epochs 4 --batch-size 32 --out out", 1.5),
    _case("compare", f"compare {IN}/table --algorithms base,manydg --seeds 1 SMALL --out out"),
    _case("tune", f"tune {IN}/table --algorithms base --trials 2 --seeds 1 SMALL --out out", 0.5),
    _case("experiment", f"experiment weights {IN}/table --seeds 1 SMALL --out out", 0.5),
    _case("predict", f"predict {IN}/run {IN}/table.csv --out out"),
    _case("report", f"report {IN}/results --out out.html"),
    _case("export", f"export {IN}/run --format torch --out out.pt2", 0.5),
    _case("demo", "demo --patients 20 --seeds 1 --epochs 1 --out out", 0.1),
)


@dataclass
class Outcome:
    """What happened to the commands."""

    kills: Counter[str] = field(default_factory=Counter)
    fresh: int = 0
    ended_before: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def lines(self, seed: int, seconds: float) -> list[str]:
        """Counts for a reader."""
        total = sum(self.kills.values())
        return [
            *(f"  {case.name}: {self.kills[case.name]} kills, compared {self.compared[case.name]}" for case in CASES),
            f"seed {seed}: {total} kills ({self.fresh} of fresh interpreters) in {seconds:.0f} s, "
            f"{sum(self.compared.values())} results compared with undisturbed ones, {self.ended_before} ended before "
            f"the kill, {len(self.failures)} failures",
            *(f"FAILURE {failure}" for failure in self.failures),
        ]


class Soak:
    """Undisturbed results in ``whole/CASE``, disturbed ones in ``killed/CASE``."""

    def __init__(self, folder: Path, seed: int, cases: Sequence[Case] = CASES) -> None:
        self.folder, self.cases, self._random = folder, cases, random.Random(seed)
        self._logs = folder / "logs"
        self._server = Server(self._logs, [*LIBRARIES, *PACKAGE])
        self._seconds: dict[tuple[str, bool], float] = {}
        self._wholes: dict[str, dict[str, str]] = {}
        self.outcome = Outcome()

    def prepare(self) -> None:
        """Write the inputs and run every command undisturbed, to know its result and how long it takes."""
        inputs = self.folder / "inputs"
        inputs.mkdir(parents=True)
        write_inputs(inputs, self._run)
        self._inputs = contents(inputs)
        for case in self.cases:
            folder = self._new_folder("whole", case)
            self._run(case.arguments, folder)
            self._server.preload()
            self._wholes[case.name] = contents(folder)
        first = self.cases[0]
        start_up = self._run(first.arguments, self._new_folder("killed", first), fresh=True)
        for case in self.cases:
            self._seconds[case.name, False] = self._run(case.arguments, self._new_folder("killed", case))
            self._seconds[case.name, True] = self._seconds[case.name, False] + start_up

    def run(self, kills: int) -> Outcome:
        """Kill until there were so many kills."""
        weights = [case.weight for case in self.cases]
        while sum(self.outcome.kills.values()) < kills:
            before = sum(self.outcome.kills.values())
            self._one(self._random.choices(self.cases, weights)[0], kills)
            if sum(self.outcome.kills.values()) // PROGRESS > before // PROGRESS:
                print(f"{sum(self.outcome.kills.values())} kills", file=sys.stderr, flush=True)
        if contents(self.folder / "inputs") != self._inputs:
            self.outcome.failures.append("the commands changed their inputs")
        return self.outcome

    def close(self) -> None:
        self._server.close()

    def _one(self, case: Case, kills: int) -> None:
        """Kill a command once or several times in a row, let it end, and compare."""
        folder, history = self._new_folder("killed", case), []
        while True:
            fresh = self._random.random() < FRESH_SHARE
            delay = self._random.random() * self._seconds[case.name, fresh]
            start = time.monotonic()
            process = self._start(case.arguments, folder, fresh)
            code = process.wait(delay)
            if code is None:
                code = process.kill()
            if code != -signal.SIGKILL:
                self.outcome.ended_before += 1
                # The machine is less busy now than when the undisturbed command was timed, or work was taken over.
                self._seconds[case.name, fresh] *= 0.7
                self._seconds[case.name, fresh] += 0.3 * (time.monotonic() - start)
                if code != 0:
                    self._fail(case, history, f"exit {code} after a kill: {process.err[-500:]}")
                break
            self.outcome.kills[case.name] += 1
            self.outcome.fresh += fresh
            history.append(f"{delay:.3f} s{' fresh' if fresh else ''}")
            if process.children_outlive_it(ORPHAN_SECONDS):
                self._fail(case, history, "children outlived it")
            if self._is_complete(case, folder) or sum(self.outcome.kills.values()) >= kills:
                break
            if self._random.random() > AGAIN_SHARE:
                break
        if history:
            self._finish(case, folder, history)

    def _finish(self, case: Case, folder: Path, history: list[str]) -> None:
        expected = 2 if self._is_complete(case, folder) else 0
        process = self._start(case.arguments, folder, fresh=False)
        code = process.wait(LIMIT)
        if code != expected:
            process.kill() if code is None else None
            self._fail(case, history, f"exit {code} when run again: {process.err[-500:]}")
            return
        result = contents(folder)
        if result != self._wholes[case.name]:
            self._fail(case, history, _difference(self._wholes[case.name], result))
        self.outcome.compared[case.name] += 1

    def _is_complete(self, case: Case, folder: Path) -> bool:
        """Whether the command was killed after it had written everything and would now refuse to write it again."""
        refuses = case.arguments[0] in ("synthesize", "prepare", "predict") and not case.before
        return refuses and (folder / "out").exists()

    def _fail(self, case: Case, history: list[str], what: str) -> None:
        failure = f"{case.name}: killed after {', '.join(history) or 'nothing'}: {what}"
        print(f"FAILURE {failure}", file=sys.stderr, flush=True)
        self.outcome.failures.append(failure)
        kept = self.folder / "failed" / str(len(self.outcome.failures))
        shutil.copytree(self.folder / "killed" / _slug(case), kept, dirs_exist_ok=True)

    def _new_folder(self, kind: str, case: Case) -> Path:
        folder = self.folder / kind / _slug(case)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if case.before:
            self._run(case.before, folder, fresh=False)
        return folder

    def _start(self, arguments: Sequence[str], folder: Path, fresh: bool) -> Process:
        return start_fresh(arguments, folder, self._logs) if fresh else self._server.start(arguments, folder)

    def _run(self, arguments: Sequence[str], folder: Path, fresh: bool = False) -> float:
        """Run a command that must succeed; the seconds it took."""
        start = time.monotonic()
        process = self._start(arguments, folder, fresh)
        code = process.wait(LIMIT)
        if code != 0:
            raise RuntimeError(f"manydg {' '.join(arguments)}: exit {code}: {process.err}")
        return time.monotonic() - start


def write_inputs(folder: Path, run: object) -> None:
    """Raw files, a dataset, a run and a study's results."""
    assert callable(run)
    for name, seed in (("table", 0), ("other", 1)):
        x, y, who = arrays(seed)
        columns = {f"f{k}": x[:, k] for k in range(x.shape[1])}
        stages = np.array(["N1", "N2", "W"])[y]
        pl.DataFrame({"patient": [f"p{k}" for k in who], "stage": stages, **columns}).write_csv(folder / f"{name}.csv")
    x, y, who = arrays(0)
    for name, array in (("x", x), ("y", y), ("who", who)):
        np.save(folder / f"{name}.npy", array)
    for command in (
        "synthesize sleep-edf --patients 3 --nights 1 --hours 1 --out raw-sleep",
        "synthesize mimic3 --patients 40 --out raw-mimic",
        "synthesize meds --patients 30 --out raw-meds",
    ):
        run(command.split(), folder)
    run(["prepare", "table", "table.csv", *TABLE, "--out", "table"], folder)
    run(["train", "table", *SMALL, "--out", "run"], folder)
    run(["compare", "table", "--algorithms", "base,manydg", "--seeds", "2", *SMALL, "--out", "results"], folder)


def arrays(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, classes and patients of a small task."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(20), 6)
    y = rng.integers(0, 3, len(who))
    return (rng.normal(size=(len(who), 5)) + y[:, None]).astype(np.float32), y, who


def _slug(case: Case) -> str:
    return case.name.replace(" ", "-")


def _difference(whole: dict[str, str], result: dict[str, str]) -> str:
    missing, more = sorted(whole.keys() - result), sorted(result.keys() - whole)
    other = sorted(name for name in whole.keys() & result if whole[name] != result[name])
    return f"missing {missing}, left over {more}, other content {other}"


def soak(kills: int, seed: int, names: Sequence[str] = (), keep: Path | None = None) -> Outcome:
    """Kill ``kills`` times, print the counts, and return them."""
    start = time.monotonic()
    cases = [case for case in CASES if not names or case.name in names]
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        work = Soak(Path(keep or folder) / "work", seed, cases)
        try:
            work.prepare()
            print(f"undisturbed results after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            outcome = work.run(kills)
        finally:
            work.close()
    print("\n".join(outcome.lines(seed, time.monotonic() - start)), flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--case", action="append", default=[], help="only this command; may be repeated")
    parser.add_argument("--keep", type=Path, help="folder to work in, which stays")
    given = parser.parse_args()
    return int(bool(soak(given.kills, given.seed, given.case, given.keep).failures))


if __name__ == "__main__":
    sys.exit(main())
