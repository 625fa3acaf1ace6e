"""Which code made a result: a hash of the modules that can change one."""

from __future__ import annotations

from functools import cache

import manydg
from manydg._code import source_digest

_DECISIVE = ("data", "backbones", "algorithms", "training", "evaluation", "targets.py")


@cache
def code_version() -> str:
    """Package version and a hash of the source that decides results; the same on every machine."""
    return f"{manydg.__version__}+{source_digest(_DECISIVE)}"
