"""Mutants: small wrong changes of the source, each of which a test must notice.

``python -m tools.mutants`` reads ``tests/mutants.toml``. For each entry it changes a line in a copy of the checkout and
runs the tests that the entry names: the mutant is killed if one of them fails. It is an error if a mutant survives, if
its line is not in the source any more, or if its tests fail without it. Tests run in forks of a process that has the
large libraries imported, two at a time.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = Path("tests/mutants.toml")
_LIBRARIES = (
    "edfio",
    "hypothesis.strategies",
    "polars",
    "pydantic.json_schema",
    "pytest",
    "rich.table",
    "scipy.stats",
    "sklearn.cluster",
    "sklearn.covariance",
    "sklearn.metrics",
    "torch._dynamo",
    "torch.func",
    "typer",
)
"""What most tests import: once here, not once for each mutant."""
_SECONDS = 600
PASSES, KILLED, SURVIVED, BROKEN = "passes", "killed", "survived", "broken"
PASSED, FAILED, BROKEN_CODE = 0, 1, 3
"""Exit codes of pytest, and that of a fork which came to no result."""


@dataclass(frozen=True)
class Mutant:
    """One wrong change.

    Attributes
    ----------
    rule : str
        What the change breaks.
    file : str
        The source file, from the root of the checkout.
    before, after : str
        Text that occurs once in the file, and what stands there instead.
    tests : tuple of str
        Files or node ids of tests, at least one of which must fail.
    """

    rule: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """What came of some tests, with a mutant or without: how it ended, how long it took, and the end of the output."""

    tests: tuple[str, ...]
    mutant: Mutant | None
    outcome: str
    seconds: float
    output: str = ""

    def __str__(self) -> str:
        what = f"{self.mutant.file}: {self.mutant.rule}" if self.mutant else "the source as it is"
        return f"{self.outcome} ({self.seconds:.1f} s): {what}" + (f"; {' '.join(self.tests)}" if self.mutant else "")


def read_mutants(root: Path = ROOT) -> list[Mutant]:
    """The committed list."""
    entries = tomllib.loads((root / LIST).read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def stale(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """One line for each mutant that cannot be applied, or whose tests are not there."""
    problems = []
    for mutant in mutants:
        path = root / mutant.file
        times = path.read_text(encoding="utf-8").count(mutant.before) if path.is_file() else 0
        if times != 1:
            problems.append(f"{mutant.file}: {mutant.before!r} occurs {times} times, not once ({mutant.rule})")
        if mutant.before == mutant.after:
            problems.append(f"{mutant.file}: the mutant of {mutant.before!r} changes nothing ({mutant.rule})")
        for test in mutant.tests:
            file, *names = test.split("::")
            text = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
            if not text or any(f"def {name.partition('[')[0]}(" not in text for name in names):
                problems.append(f"{mutant.file}: there is no test {test} ({mutant.rule})")
    return problems


class Workbench:
    """A copy of the checkout in which one mutant at a time is tested.

    Parameters
    ----------
    folder : Path
        Where the copy is made.
    root : Path
        The checkout.
    """

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder, self.output = folder, folder.with_suffix(".txt")
        for name in _files(root):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
        # Compiled once; a changed file is noticed by its content, however quickly it was changed.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "src", quiet=2, invalidation_mode=mode)

    def apply(self, mutant: Mutant) -> None:
        self._replace(mutant.file, mutant.before, mutant.after)

    def revert(self, mutant: Mutant, root: Path) -> None:
        shutil.copy2(root / mutant.file, self.folder / mutant.file)

    def _replace(self, file: str, before: str, after: str) -> None:
        path = self.folder / file
        path.write_text(path.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")

    def start(self, tests: Sequence[str]) -> int:
        """Run tests in a fork of this process, whose number is returned; it ends with pytest's exit code."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        code = BROKEN_CODE
        try:
            os.setpgid(0, 0)
            code = self._run(tests)
        finally:
            os._exit(code)

    def _run(self, tests: Sequence[str]) -> int:
        log = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(self.folder)
        source = str(self.folder / "src")
        sys.path[:0] = [source, str(self.folder)]
        os.environ["PYTHONPATH"] = source
        # This program is of the package 'tools' too: the tests import the copy's.
        for name in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
            del sys.modules[name]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers --import-mode=importlib"]
        code = int(pytest.main([*options, *tests]))
        sys.stdout.flush()
        packages = [sys.modules[name] for name in ("manydg", "tools") if name in sys.modules]
        tested_the_copy = all(str(package.__file__).startswith(str(self.folder)) for package in packages)
        return code if tested_the_copy else BROKEN_CODE


def _files(root: Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode().split("\0")
    return [name for name in names if name and (root / name).is_file()]


@dataclass
class _Trial:
    """Tests to run, with a mutant or without."""

    tests: tuple[str, ...]
    mutant: Mutant | None
    started: float = 0.0


def run(mutants: Sequence[Mutant], folder: Path, jobs: int, root: Path = ROOT) -> Iterator[Verdict]:
    """Test every mutant, several at a time, and first that all the tests pass without one."""
    if (root.parent / "shared").exists():
        (folder / "shared").symlink_to(root.parent / "shared")
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    waiting = [_Trial(tests[part::jobs], None) for part in range(jobs) if tests[part::jobs]]
    waiting += [_Trial(mutant.tests, mutant) for mutant in mutants]
    free = [Workbench(folder / f"copy{number}", root) for number in range(jobs)]
    running: dict[int, tuple[_Trial, Workbench]] = {}
    while waiting or running:
        while waiting and free:
            trial, bench = waiting.pop(0), free.pop()
            if trial.mutant is not None:
                bench.apply(trial.mutant)
            trial.started = time.monotonic()
            running[bench.start(trial.tests)] = trial, bench
        for child in _ended(running):
            trial, bench = running.pop(child.number)
            yield _verdict(trial, child.code, bench.output)
            if trial.mutant is not None:
                bench.revert(trial.mutant, root)
            free.append(bench)


@dataclass(frozen=True)
class _Child:
    number: int
    code: int


def _ended(running: Mapping[int, tuple[_Trial, Workbench]]) -> list[_Child]:
    """The forks that have ended, each with its exit code; one that takes too long is ended here."""
    time.sleep(0.02)
    ended = []
    for number, (trial, _) in running.items():
        if time.monotonic() - trial.started > _SECONDS:
            os.killpg(number, signal.SIGKILL)
        child, status = os.waitpid(number, os.WNOHANG)
        if child:
            ended.append(_Child(number, os.waitstatus_to_exitcode(status)))
    return ended


def _verdict(trial: _Trial, code: int, output: Path) -> Verdict:
    outcomes = {PASSED: SURVIVED, FAILED: KILLED} if trial.mutant else {PASSED: PASSES}
    seconds, tail = time.monotonic() - trial.started, output.read_text(encoding="utf-8", errors="replace")[-3000:]
    return Verdict(trial.tests, trial.mutant, outcomes.get(code, BROKEN), seconds, tail)


def main() -> None:
    """Run the list, print one line per mutant that is not killed and a line at the end."""
    parser = argparse.ArgumentParser(description="Check that the tests notice every mutant of tests/mutants.toml.")
    parser.add_argument("--only", default="", help="only mutants whose file or rule contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--verbose", action="store_true", help="one line for every mutant, and what its tests printed")
    options = parser.parse_args()
    mutants = read_mutants()
    if problems := stale(mutants):
        sys.exit("\n".join(problems))
    chosen = [mutant for mutant in mutants if options.only in mutant.file or options.only in mutant.rule]
    for library in _LIBRARIES:
        importlib.import_module(library)
    began, bad = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        for verdict in run(chosen, Path(folder), options.jobs):
            wrong = verdict.outcome in (SURVIVED, BROKEN)
            bad += wrong
            if wrong or options.verbose:
                print(verdict, flush=True)
            if verdict.outcome == BROKEN:
                print(verdict.output, flush=True)
    print(f"{len(chosen)} mutants, {bad} problems, {time.monotonic() - began:.0f} s")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
