"""Commands in processes that can be killed: forked from a server with libraries imported, or started from nothing."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Third-party modules that make up nearly all of a command's start.
LIBRARIES = (
    "torch",
    "torch._dynamo",
    "torch.export",
    "numpy",
    "polars",
    "scipy.stats",
    "sklearn.metrics",
    "sklearn.linear_model",
    "safetensors.torch",
    "pydantic.json_schema",
    "typer",
    "jinja2",
    "rich.table",
    "edfio",
    "pyarrow.parquet",
)
# What commands import of the package itself.
PACKAGE = (
    "manydg.cli",
    "manydg.cli._options",
    "manydg.estimator",
    "manydg.predict",
    "manydg.report",
    "manydg.studies.conduct",
    "manydg.studies.summary",
    "manydg.training.run",
    "manydg.training.export",
    "manydg.sources.sleep_edf",
    "manydg.sources.mimic3",
    "manydg.sources.meds",
    "manydg.sources.table",
    "manydg.sources.arrays",
)


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Compiling every module anew would be most of a fresh interpreter's start.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "manydg-soak-pycache"),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "160",
        "CUDA_VISIBLE_DEVICES": "",
        # Torch's own cache, which it keeps among temporary files on purpose.
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "torchinductor"),
    }


class Process:
    """A command that runs; ``reap`` gives its exit code once it has ended."""

    def __init__(self, process: int, reap: Callable[[], int], out: Path, err: Path) -> None:
        self.process, self._reap, self._out, self._err = process, reap, out, err

    def wait(self, seconds: float) -> int | None:
        """The exit code, or none if it still runs after so many seconds."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.process)
            try:
                if not select.select([handle], [], [], max(0.0, seconds))[0]:
                    return None
            finally:
                os.close(handle)
        return self._reap()

    def kill(self) -> int:
        """Send SIGKILL to this process alone, not to its children; its exit code, which tells whether it had ended."""
        os.kill(self.process, signal.SIGKILL)
        return self._reap()

    def children_outlive_it(self, seconds: float) -> bool:
        """Whether processes it started still run after so many seconds; they are killed then."""
        stop = time.monotonic() + seconds
        while rest := _in_session(self.process):
            if time.monotonic() > stop:
                for process in rest:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                return True
            time.sleep(0.02)
        return False

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(encoding="utf-8", errors="replace")


def _in_session(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    members.append(int(entry.name))
    return members


class Server:
    """Forks commands from one process with modules imported (see ``server.py``)."""

    def __init__(self, logs: Path, modules: Sequence[str], gigabytes: int = 0) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._gigabytes = logs, gigabytes
        program = [sys.executable, str(Path(__file__).with_name("server.py")), *modules]
        self._server = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def start(self, arguments: Sequence[str], folder: Path) -> Process:
        out, err = self._logs / "forked.out", self._logs / "forked.err"
        request = {
            "arguments": list(arguments),
            "folder": str(folder),
            "out": str(out),
            "err": str(err),
            "temporary": str(temporary(folder)),
            "gigabytes": self._gigabytes,
        }
        process = self._ask({"start": request})
        return Process(process, lambda: self._ask({"reap": process}), out, err)

    def preload(self) -> None:
        """Import in the server what the last command that ended had imported, so that later ones need not."""
        file = self._logs / "forked.modules"
        if file.exists():
            self._ask({"import": file.read_text(encoding="utf-8").split()})

    def _ask(self, request: dict[str, object]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate()


def start_fresh(arguments: Sequence[str], folder: Path, logs: Path) -> Process:
    """Start the interpreter itself, so that everything is imported anew."""
    program = "import secrets; secrets.token_hex = lambda size: '5a' * size; from manydg.cli import main; main()"
    out, err = logs / "fresh.out", logs / "fresh.err"
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            cwd=folder,
            env={**environment(), "TMPDIR": str(temporary(folder))},
            start_new_session=True,
        )
    return Process(process.pid, process.wait, out, err)


def temporary(folder: Path) -> Path:
    """The folder for temporary files of the commands that run in a folder."""
    path = folder / "tmp"
    path.mkdir(exist_ok=True)
    return path
