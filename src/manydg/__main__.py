"""``python -m manydg``: the command, for launchers that start Python modules, such as ``torchrun``."""

from __future__ import annotations

import os
import sys

# "python -m" puts the working directory first, where a stranger's files may be; classes of the user's own that are
# there are found by name (manydg.registry).
if __name__ == "__main__" and sys.path and sys.path[0] == os.getcwd() and not sys.flags.safe_path:
    del sys.path[0]

from manydg.cli import main

if __name__ == "__main__":
    main()
