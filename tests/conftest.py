"""What several tests share."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, from_arrays

# The same examples on every machine, so that a commit that passed passes again; make test-slow draws fresh ones.
settings.register_profile("same-examples", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same-examples"))

# No test can see what it guards against, a power cut, and waiting for the disk took a tenth of the time; the
# soak waits.
os.fsync = lambda descriptor: None

# Tests that need Linux's signals, limits of file sizes, links or control groups: words of their names.
_LINUX_ONLY = re.compile(
    r"kill|full_disk|disk_that_fills|limit_on_file_size|cannot_grow|gpu_sharing|out_of_core|two_files_of_one_night"
    r"|what_is_prepared_already"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if sys.platform != "linux":
        for item in items:
            if _LINUX_ONLY.search(item.nodeid):
                item.add_marker(pytest.mark.skip(reason="needs Linux"))


SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real open data beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"real data are not here ({SHARED}): see docs/datasets.md")
    return SHARED


@pytest.fixture(autouse=True)
def _same_randomness() -> None:
    torch.manual_seed(0)


def make_dataset(kind: str = "classes", patients: int = 12, samples: int = 8, features: int = 6) -> DomainDataset:
    """A small learnable dataset of any target kind: class means plus a patient's shift plus noise."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(patients), samples)
    label = rng.integers(0, 2 if kind == "binary" else 3, len(who))
    means = rng.normal(size=(3, features))
    x = means[label] + rng.normal(size=(patients, features))[who] * 0.5 + rng.normal(size=(len(who), features)) * 0.3
    if kind == "votes":
        targets = rng.integers(0, 3, (len(who), 3)) + 9 * np.eye(3, dtype=int)[label]
    elif kind == "multilabel":
        targets = (x[:, :4] > 0).astype(int)
    elif kind == "regression":
        targets = 20 * label + 100 + x[:, 0]
    else:
        targets = label
    return from_arrays(x, targets, who, kind=kind)


def make_visits(rows: int, longest: int, per_patient: int) -> DomainDataset:
    """One visit to the longest number of them a sample, two codes of each kind a visit, and drugs to tell."""
    rng = np.random.default_rng(0)
    lengths = 1 + np.arange(rows) % longest
    inputs = {
        name: Ragged.from_rows([rng.integers(1, size, (length - less, 2)).tolist() for length in lengths])
        for name, size, less in (("diagnoses", 15, 0), ("procedures", 10, 0), ("history_drugs", 6, 1))
    }
    drugs = [f"drug{code}" for code in range(6)]
    info = {"vocabularies": {"diagnoses": ["?"] * 15, "procedures": ["?"] * 10, "drugs": drugs}}
    given, who = rng.integers(0, 2, (rows, 6)), np.arange(rows) // per_patient
    return from_arrays(inputs, given, who, kind="multilabel", names=drugs, info=info)


@pytest.fixture(scope="session")
def visits_of() -> Callable[..., DomainDataset]:
    """:func:`make_visits`, for tests in other folders."""
    return make_visits


@pytest.fixture
def small_dataset() -> DomainDataset:
    return make_dataset()


@pytest.fixture(scope="session")
def dataset_of() -> Callable[..., DomainDataset]:
    """:func:`make_dataset`, for tests in other folders."""
    return make_dataset


class Command:
    """A ``manydg`` process."""

    def __init__(self, server: Commands, process: int, out: Path, err: Path) -> None:
        self._server, self.process, self._out, self._err = server, process, out, err

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)

    def wait(self) -> int:
        """The exit code; minus nine where the process was killed."""
        return self._server.ask({"wait": self.process})

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8") if self._out.exists() else ""

    @property
    def err(self) -> str:
        return self._err.read_text(encoding="utf-8") if self._err.exists() else ""


class Commands:
    """Starts ``manydg`` processes from one that has everything imported (see ``_command_server.py``)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0
        program = [sys.executable, str(Path(__file__).with_name("_command_server.py"))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self._server = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, request: dict[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def start(
        self,
        *arguments: object,
        modules: Sequence[Path] = (),
        folder: Path | None = None,
        file_bytes: int = 0,
        die_at: int = 0,
    ) -> Command:
        """Start ``manydg ARGUMENTS`` in a folder, with folders of modules to import from, with a limit to the size of
        files, or to die at its n-th write."""
        self._count += 1
        out, err = self.folder / f"{self._count}.out", self.folder / f"{self._count}.err"
        request = {
            "arguments": [str(argument) for argument in arguments],
            "out": str(out),
            "err": str(err),
            "folder": str(folder or self.folder),
            "modules": [str(place) for place in modules],
            "file_bytes": file_bytes,
            "die_at": die_at,
        }
        return Command(self, self.ask(request), out, err)

    def run(self, *arguments: object, **options: Any) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command."""
        command = self.start(*arguments, **options)
        code = command.wait()
        return code, command.out, command.err

    def close(self) -> None:
        self._server.communicate()


class PlainCommands(Commands):
    """The same without forking, where that is not safe or not possible: every command imports everything anew."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def ask(self, request: dict[str, Any]) -> int:
        if "wait" in request:
            return self._processes[request["wait"]].wait()
        if request["file_bytes"] or request["die_at"]:
            pytest.skip("needs Linux")
        paths = [*request["modules"], *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUTF8": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with Path(request["out"]).open("wb") as out, Path(request["err"]).open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "manydg", *request["arguments"]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=request["folder"],
                env=environment,
            )
        self._processes[process.pid] = process
        return process.pid

    def close(self) -> None:
        for process in self._processes.values():
            process.wait()


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    kind = Commands if sys.platform == "linux" else PlainCommands
    server = kind(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()
