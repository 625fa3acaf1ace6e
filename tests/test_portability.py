"""Linux, macOS and Windows: what only POSIX has is not needed, and text is read and written in one encoding."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import manydg

SOURCE = Path(manydg.__file__).parent

# Other packages look at the platform when they are imported, so they come first: what is missing is missing for ours.
WITHOUT_POSIX = """
import multiprocessing, os, signal, sys
import concurrent.futures.process, asyncio, numpy, polars, rich.live, safetensors.torch, scipy.stats, sklearn.metrics
import sklearn.utils, torch, torch.distributed, typer, typer.rich_utils
import torch.utils._python_dispatch

assert not [name for name in sys.modules if name.startswith("manydg")]
for name in ("resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "syslog"):
    sys.modules[name] = None  # importing it fails
for name in dir(os):
    if name.startswith(("fork", "posix_", "sched_", "getuid", "geteuid", "getgid", "setsid", "killpg", "mkfifo", "nice",
                        "pread", "pwrite", "sysconf", "statvfs", "register_at_fork", "wait")) and name != "posix_spawn":
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM", "alarm", "setitimer"):
    signal.__dict__.pop(name, None)
multiprocessing.set_start_method("spawn")
"""

ESTIMATOR = """
import numpy as np
from manydg import ManyDGClassifier

rng = np.random.default_rng(0)
patients, y = np.repeat(np.arange(12), 10), rng.integers(0, 2, 120)
X = (rng.normal(size=(120, 4)) + y[:, None]).astype(np.float32)
model = ManyDGClassifier(epochs=2).fit(X, y, groups=patients)
assert model.predict_proba(X).shape == (120, 2)
model.save(sys.argv[1] + "/model")
assert (ManyDGClassifier.load(sys.argv[1] + "/model").predict(X) == model.predict(X)).all()
"""

TRAIN = """
import numpy as np, manydg
from manydg.cli import main

rng = np.random.default_rng(0)
patients, y = np.repeat(np.arange(12), 10), rng.integers(0, 2, 120)
manydg.from_arrays(rng.normal(size=(120, 4)) + y[:, None], y, patients).save(sys.argv[1] + "/data")
sys.argv[1:] = ["train", sys.argv[1] + "/data", "--out", sys.argv[1] + "/run", "--epochs", "2"]
main()
"""


def test_training_needs_nothing_that_only_posix_has(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_POSIX + ESTIMATOR + TRAIN, str(tmp_path / "made")]
    (tmp_path / "made").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def _text_files_without_encoding(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name not in {"open", "read_text", "write_text", "TemporaryFile", "NamedTemporaryFile"}:
            continue
        modes = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        binary = name not in {"read_text", "write_text"} and any("b" in str(mode) for mode in modes)
        given = any(keyword.arg in ("encoding", None) for keyword in node.keywords)
        if not (binary or given or ast.unparse(node.func) == "os.open"):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_every_text_file_is_opened_in_a_stated_encoding() -> None:
    guessed = {
        path.relative_to(SOURCE).as_posix(): calls
        for path in sorted(SOURCE.rglob("*.py"))
        if (calls := list(_text_files_without_encoding(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert not guessed


@pytest.mark.parametrize("call", ["open(p)", "p.open('r')", "p.read_text()", "(a / b).write_text('x')"])
def test_a_text_file_opened_in_the_encoding_of_the_machine_is_noticed(call: str) -> None:
    assert list(_text_files_without_encoding(ast.parse(call)))
