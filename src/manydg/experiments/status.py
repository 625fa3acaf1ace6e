"""How far a run is, in a small file beside it: what the progress board reads, also from other processes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class StatusFile:
    """A reporter of training runs that keeps the last epoch's figures in a file.

    A status that cannot be written is let go: it must not stop a run.

    Parameters
    ----------
    file : Path
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.epochs = 0

    def started(self, algorithm: str, epochs: int, first_epoch: int) -> None:
        self.epochs = epochs
        self._write({"epoch": first_epoch - 1, "epochs": epochs})

    def epoch_ended(self, entry: Mapping[str, Any]) -> None:
        shown = {key: entry[key] for key in ("epoch", "losses", "val", "seconds")}
        self._write({**shown, "epochs": self.epochs})

    def finished(self, record: Mapping[str, Any]) -> None:
        pass

    def remove(self) -> None:
        """Take the file away at the end of the run."""
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)

    def _write(self, status: Mapping[str, Any]) -> None:
        # Not through to the disk, as everything that must survive is: nobody needs it after a crash.
        partial = self.file.with_name(f".{self.file.name}")
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(status))
            partial.rename(self.file)


def read_status(file: Path) -> dict[str, Any]:
    """What a status file says; empty where there is none yet or no more."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found
