"""Runs ``manydg`` commands as processes of their own, quickly: everything is imported once, then forked.

Each line of standard input is a request in JSON, answered by one line: ``start`` forks a process that runs the command
and answers its id; ``wait`` answers the exit code of a process (minus the signal's number where one killed it).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

# What every command would otherwise import anew; an optimiser's first step alone needs seconds for torch._dynamo.
MODULES = (
    "manydg.cli",
    "manydg.cli._options",
    "manydg.studies.conduct",
    "manydg.studies.summary",
    "manydg.training.run",
    "pydantic.json_schema",
    "sklearn.metrics",
    "torch._dynamo",
)


def serve() -> None:
    import torch

    from manydg.algorithms import ALGORITHMS
    from manydg.backbones import BACKBONES
    from manydg.files import code_version

    for module in MODULES:
        importlib.import_module(module)
    for registry in (ALGORITHMS, BACKBONES):
        for name in registry.names():
            registry.get(name)
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # As in conftest.py.
    code_version()  # Once, so that the code may be edited while tests run.
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = start(request)
        print(answer, flush=True)


def start(request: dict[str, Any]) -> int:
    process = os.fork()
    if process:
        return process
    for descriptor, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["folder"])
    sys.path[:0] = request["modules"]
    if request["file_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)
    if request["die_at"]:
        die_at_write(request["die_at"])
    sys.argv = ["manydg", *request["arguments"]]
    code = 70
    try:
        manydg_main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:  # noqa: BLE001 - whatever escapes is shown as the interpreter would
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def manydg_main() -> None:
    from manydg.cli import main

    main()


def die_at_write(number: int) -> None:
    """Kill this process right before the n-th time it renames a finished file into place."""
    real, calls = Path.replace, 0

    def replace(path: Path, target: Any) -> Path:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, target)

    Path.replace = replace  # type: ignore[method-assign]


if __name__ == "__main__":
    serve()
