"""Forks ``manydg`` commands from a process that has imported the modules named on its command line.

Each line of standard input is a request in JSON, answered by one line: ``start`` forks a process in a session of its
own that runs the command and answers its id; ``reap`` answers the exit code of a process that has ended; ``import``
imports more modules.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import secrets
import signal
import sys
import traceback
from pathlib import Path

GIGABYTE = 1 << 30


def serve(modules: list[str]) -> None:
    # Standard output is for answers alone, whatever a library prints while it is imported.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    preload(modules)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        elif "import" in request:
            answer = preload(request["import"])
        else:
            answer = os.fork() or run(**request["start"])
        print(answer, file=answers, flush=True)


def preload(modules: list[str]) -> int:
    """Import modules; how many there are now."""
    for module in modules:
        # What a module needs of its moment, such as a plug-in that was loaded by its file, is not for the server.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    return len(sys.modules)


def fixed_key(size: int = 32) -> str:
    """In place of a dataset's random key of pseudonyms, so that two datasets of the same content can be compared."""
    return "5a" * size


def run(arguments: list[str], folder: str, out: str, err: str, temporary: str, gigabytes: int) -> int:
    """Become the command; never returns."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ["TMPDIR"] = temporary
    if gigabytes:
        # Of address space beyond what the libraries have mapped already.
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + gigabytes * GIGABYTE,) * 2)
    secrets.token_hex = fixed_key
    sys.argv = ["manydg", *arguments]
    known = set(sys.modules)
    code = 70
    try:
        from manydg.cli import main

        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:  # noqa: BLE001 - whatever escapes is shown as the interpreter would
        traceback.print_exc()
    with contextlib.suppress(OSError):
        Path(err).with_suffix(".modules").write_text("\n".join(sorted(set(sys.modules) - known)), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
