"""``manydg demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manydg.cli._options import Device, Workers

ALGORITHMS = ("base", "boosting", "prototype", "manydg-random-pairs", "manydg")


def demo(
    out: Annotated[Path, typer.Option(help="Where the dataset and the results go.")] = Path("demo-results"),
    patients: Annotated[int, typer.Option(min=20, help="Synthetic patients.")] = 240,
    seeds: Annotated[int, typer.Option(min=1, help="Patient splits.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Training epochs.")] = 12,
    workers: Workers = 2,
    device: Device = "auto",
) -> None:
    """Watch the algorithms compete on synthetic patients.

    ManyDG, its controls and its rivals are trained on synthetic patients and judged on others that none of them has
    seen. Nothing is downloaded, and it takes a few minutes on two cores.
    """
    from manydg.cli._progress import console, study_board
    from manydg.cli.compare import command_line, show_summary
    from manydg.config import TrainingConfig
    from manydg.studies.conduct import compare
    from manydg.studies.demo import make_demo_dataset

    dataset = make_demo_dataset(patients)
    place = out / "dataset"
    dataset.save(place, overwrite=True)
    new = len(dataset.info.test_patients)
    console.print(
        f"{len(dataset)} samples of {patients} synthetic patients, drawn from the paper's generative model; {new} of "
        "them are new: nobody trains on them, and a spurious covariate that helps on the others misleads there",
    )
    compare(
        place,
        ALGORITHMS,
        seeds,
        out,
        options=TrainingConfig(epochs=epochs, lr=1e-3),
        name="demo",
        workers=workers,
        device=device,
        board=study_board(),
        command=command_line(),
    )
    show_summary(out)
    console.print(f"next: 'manydg report {out} --out report.html', or 'manydg prepare --help' for data of your own")


def register(app: typer.Typer) -> None:
    app.command()(demo)
