"""Which code made a result: a hash of the modules that can change one."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import manydg

_DECISIVE = ("data", "backbones", "algorithms", "training", "evaluation", "targets.py")


@cache
def code_version() -> str:
    """Package version and a hash of the source that decides results; the same on every machine."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=5)
    for part in _DECISIVE:
        place = root / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.relative_to(root).as_posix().encode())
            digest.update(file.read_bytes())
    return f"{manydg.__version__}+{digest.hexdigest()}"
