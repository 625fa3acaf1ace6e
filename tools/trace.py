"""Count the package's files and functions that four everyday calls run: a measure of how far a reader has to hop.

``python -m tools.trace`` traces each call in a process of its own with ``sys.setprofile``, threads included, and prints
functions, files and changes of file. ``--details`` lists the files in the order in which they are entered, with what
runs in each.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

TARGETS = {"train": 30, "compare": 40, "fit": 22, "predict": 20}
_ARRAYS = """
import numpy as np
rng = np.random.default_rng(0)
patients, y = np.repeat(np.arange(12), 10), rng.integers(0, 2, 120)
X = (rng.normal(size=(120, 4)) + y[:, None]).astype(np.float32)
"""
_TABLE = """
import polars as pl
table = pl.DataFrame({"patient": patients, "y": y, **{f"x{i}": X[:, i] for i in range(4)}})
table.write_csv("table.csv")
sys.argv = "manydg prepare table table.csv --patient patient --target y --features x* --out data".split()
_quietly(main)
"""
_MAIN = """
from manydg.cli import main
def _quietly(call):
    try:
        call()
    except SystemExit as stop:
        assert not stop.code, stop.code
"""
# What comes before the traced call, and the call.
PROGRAMS = {
    "train": (
        _ARRAYS + _MAIN + _TABLE + 'sys.argv = "manydg train data --epochs 2 --device cpu --out run".split()',
        "_quietly(main)",
    ),
    "compare": (
        _ARRAYS + _MAIN + _TABLE + 'sys.argv = "manydg compare data --algorithms base,manydg --seeds 2 --epochs 1'
        ' --device cpu --workers 1 --out results".split()',
        "_quietly(main)",
    ),
    "fit": (
        _ARRAYS
        + "from manydg import ManyDGClassifier\nmodel = ManyDGClassifier(epochs=2, device='cpu', random_state=0)",
        "model.fit(X, y, groups=patients)",
    ),
    "predict": (
        _ARRAYS + _MAIN + _TABLE + 'sys.argv = "manydg train data --epochs 1 --device cpu --out run".split()\n'
        '_quietly(main)\nsys.argv = "manydg predict run table.csv --out predictions".split()',
        "_quietly(main)",
    ),
}


@dataclass
class Trace:
    """Which functions of a package ran, and how often the file changed from one call to the next."""

    root: str
    functions: dict[CodeType, None] = field(default_factory=dict)
    changes: int = 0
    _last: str = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # Module bodies, class bodies and comprehensions are not functions that a reader follows.
        if event != "call" or not code.co_filename.startswith(self.root) or code.co_name.startswith("<"):
            return
        if code in self.functions or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        self.functions[code] = None
        self.changes += code.co_filename != self._last
        self._last = code.co_filename

    def files(self) -> dict[str, list[str]]:
        """The functions of each file, relative to the package, in the order in which they are first entered."""
        entered: dict[str, list[str]] = {}
        for code in self.functions:
            entered.setdefault(code.co_filename.removeprefix(self.root), []).append(code.co_qualname)
        return entered


def trace(name: str) -> None:
    """Run one program in this process and print what its call ran, as JSON."""
    import contextlib
    import io

    import manydg

    before, call = PROGRAMS[name]
    names: dict[str, object] = {"sys": sys}
    tracer = Trace(str(Path(manydg.__file__).parent) + "/")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        exec(before, names)
        code = compile(call, name, "exec")
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        try:
            exec(code, names)
        finally:
            sys.setprofile(None)
    print(json.dumps({"functions": len(tracer.functions), "changes": tracer.changes, "files": tracer.files()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("calls", nargs="*", choices=[*PROGRAMS, []], metavar="CALL", help="all if none is named")
    parser.add_argument("--details", action="store_true", help="list the files as entered, with their functions")
    options = parser.parse_args()
    for name in options.calls or PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            program = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); "
            program += f"from tools.trace import trace; trace({name!r})"
            done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        result = json.loads(done.stdout)
        files = result["files"]
        print(
            f"{name:8} {result['functions']:4} functions in {len(files):3} files (aim: {TARGETS[name]}), "
            f"{result['changes']:4} changes of file"
        )
        if options.details:
            print("".join(f"           {file}: {', '.join(names)}\n" for file, names in files.items()), end="")


if __name__ == "__main__":
    main()
