"""A hash of parts of the package's own source."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import manydg


def source_digest(parts: Sequence[str]) -> str:
    """A hash of some of the package's modules and folders of modules; the same on every machine."""
    root = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=5)
    for part in parts:
        place = root / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.relative_to(root).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


# Which code made a result: a hash of the modules that can change one.


_DECISIVE = ("data", "backbones", "algorithms", "training", "evaluation", "targets.py")


@cache
def code_version() -> str:
    """Package version and a hash of the source that decides results; the same on every machine."""
    return f"{manydg.__version__}+{source_digest(_DECISIVE)}"
