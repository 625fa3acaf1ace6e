"""What a command has left in a folder, without what the clock, the memory and the process decide."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

from manydg.files import INTEGRITY

# Of the machine and of the moment, rather than of the result.
VOLATILE = {
    "seconds",
    "first_use_seconds",
    "predict_seconds",
    "peak_memory_mb",
    "estimated_seconds",
    "minutes",
    "started",
    "created",
}
# Checksums of what holds those.
VOLATILE |= {INTEGRITY}


def contents(folder: Path, *, leave_out: str = "") -> dict[str, str]:
    """A digest of every file and folder below one, hidden ones included, by relative path, but for one of them."""
    return {
        name: "folder" if path.is_dir() else digest(path)
        for path in sorted(folder.rglob("*"))
        if (name := path.relative_to(folder).as_posix()) != leave_out
    }


def digest(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.blake2b(_steady(path, content), digest_size=8).hexdigest()


def raw_contents(folder: Path) -> dict[str, str]:
    """As :func:`contents`, of the very bytes."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _steady(path: Path, content: bytes) -> bytes:
    """A file's content without what may differ from run to run."""
    if path.suffix == ".json":
        return json.dumps(_without_times(json.loads(content)), sort_keys=True).encode()
    if path.suffix == ".jsonl":
        lines = [json.dumps(_without_times(json.loads(line)), sort_keys=True) for line in content.splitlines()]
        return "\n".join(sorted(lines)).encode()
    if path.suffix == ".csv":
        rows = csv.DictReader(io.StringIO(content.decode()))
        return json.dumps([{k: v for k, v in row.items() if k not in VOLATILE} for row in rows]).encode()
    if path.suffix == ".pt2":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        return b"".join(members[name] for name in sorted(members) if "serialization_id" not in name)
    if path.suffix in (".md", ".html"):
        timed = re.search(rb"Seconds a run \|\n[^\n]*\n((\|[^\n]*\n)*)", content)
        if timed:
            content = content.replace(timed.group(1), re.sub(rb"\|[^|\n]*\|\n", b"|\n", timed.group(1)))
        content = re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", b"#", content)
        content = re.sub(rb"[0-9][0-9.,]* ?(s|ms|min|MB|GB|seconds|minutes)\b", b"#", content)
        # What such a cell is sorted by.
        return re.sub(rb'data-sort="[0-9.]+">#', b"#", content)
    if path.suffix == ".journal":
        # When each trial of a search began and by which process; the trials themselves are in its record.
        return b""
    return content


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(entry) for key, entry in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [_without_times(entry) for entry in value]
    return value
