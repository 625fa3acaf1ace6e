"""Options that say where the runs of a study are done, and where raw files are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

Engine = Annotated[str, typer.Option(help="Where runs are done: local (this machine) or ray (a Ray cluster).")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto", help="Ray: address of the cluster.", show_default="one of this machine alone"
    ),
]
CpusPerRun = Annotated[float | None, typer.Option(min=0, help="Ray: CPUs that each run needs.", show_default="1")]
GpusPerRun = Annotated[
    float | None,
    typer.Option(min=0, help="Ray: GPUs that each run needs, or a part of one.", show_default="1 where there are GPUs"),
]
FilesEngine = Annotated[
    str, typer.Option("--engine", help="Where raw files are read: local (this machine) or ray (a Ray cluster).")
]


@contextmanager
def runs_on(engine: str, address: str | None, cpus: float | None, gpus: float | None, workers: int) -> Iterator[int]:
    """Studies within the block use the engine asked for; gives how many runs may be under way.

    A cluster does as many as it has room for, unless ``--workers`` sets a limit above 1.
    """
    from manydg.jobs import UNLIMITED
    from manydg.studies.engines import engine_named, using

    with using(engine_named(engine, address, cpus, gpus)):
        yield workers if engine == "local" or workers > 1 else UNLIMITED
