"""Annotations of EDF+ files: a hypnogram's stages, say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manydg.errors import DataError
from manydg.sources._edf import memory_map, read_header, read_number


@dataclass(frozen=True)
class Annotation:
    """A remark in an EDF+ file: when, for how long (0 for a point in time), and its text."""

    onset: float
    duration: float
    text: str


def read_annotations(path: str | Path) -> list[Annotation]:
    """Every annotation of an EDF+ file, in file order; the marks that only keep time are left out."""
    header = read_header(path)
    channels = [channel for channel in header.channels if channel.holds_annotations]
    if not channels:
        raise DataError(f"{header.path} holds no annotations: it is not an EDF+ annotation file")
    records = memory_map(header)
    found: list[Annotation] = []
    for record in range(header.records):
        for channel in channels:
            stored = records[record, channel.offset : channel.offset + channel.samples_per_record]
            found.extend(_annotations_in(stored.tobytes(), header.path))
    return found


def _annotations_in(block: bytes, path: Path) -> list[Annotation]:
    found: list[Annotation] = []
    for entry in block.split(b"\0"):
        if not entry:
            continue
        timing, *texts = entry.split(b"\x14")
        onset, _, duration = timing.partition(b"\x15")
        if not texts or texts[-1] or onset[:1] not in (b"+", b"-"):
            raise DataError(f"{path} is damaged: an annotation is cut off or garbled. Download it again")
        seconds = read_number(onset, path, "annotation onset")
        length = read_number(duration, path, "annotation duration") if duration else 0.0
        found.extend(
            Annotation(seconds, length, text.decode("utf-8", "replace").strip()) for text in texts[:-1] if text
        )
    return found
