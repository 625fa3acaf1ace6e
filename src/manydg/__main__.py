"""``python -m manydg``: the command, for launchers that start Python modules, such as ``torchrun``."""

from __future__ import annotations

from manydg.cli import main

if __name__ == "__main__":
    main()
