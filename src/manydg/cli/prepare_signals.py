"""``manydg prepare`` and ``manydg synthesize`` for the two EEG datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manydg.cli._options import Address, FilesEngine
from manydg.cli._prepared import Overwrite, preparing

Raw = Annotated[Path, typer.Argument(help="Folder with the raw files.", show_default=False)]
Out = Annotated[Path, typer.Option(help="Dataset folder to write.", show_default=False)]
RawOut = Annotated[Path, typer.Option(help="New folder for the raw files.", show_default=False)]
Workers = Annotated[int, typer.Option(min=1, help="Processes that read and check files.")]
Limit = Annotated[int | None, typer.Option(help="Take only the first so many patients.", show_default="all")]
Patients = Annotated[int, typer.Option(help="How many people to make up.", show_default=False)]
Seed = Annotated[int, typer.Option(help="Decides every byte.")]


def register_prepare(app: typer.Typer) -> None:
    """Add the commands to ``manydg prepare``."""
    app.command("sleep-edf")(prepare_sleep_edf)
    app.command("iiic")(prepare_iiic)


def register_synthesize(app: typer.Typer) -> None:
    """Add the commands to ``manydg synthesize``."""
    app.command("sleep-edf")(synthesize_sleep_edf)
    app.command("iiic")(synthesize_iiic)


def prepare_sleep_edf(
    raw: Raw,
    out: Out,
    workers: Workers = 1,
    engine: FilesEngine = "local",
    address: Address = None,
    limit_patients: Limit = None,
    overwrite: Overwrite = False,
    wake_margin: Annotated[
        float | None,
        typer.Option(metavar="MINUTES", help="Wakefulness to keep on either side of sleep.", show_default="all"),
    ] = None,
    study: Annotated[str, typer.Option(help="cassette, telemetry or both.")] = "cassette",
    unpaired: Annotated[str, typer.Option(help="refuse or skip a PSG without hypnogram, or the reverse.")] = "refuse",
) -> None:
    """Sleep-EDF: nights of EEG to 30 s epochs of five stages."""
    from manydg.sources import sleep_edf

    with preparing(out, engine, address):
        sleep_edf.prepare(
            raw,
            out,
            workers=workers,
            limit_patients=limit_patients,
            overwrite=overwrite,
            wake_margin=wake_margin,
            study=study,
            unpaired=unpaired,
        )


def prepare_iiic(
    raw: Raw,
    out: Out,
    workers: Workers = 1,
    engine: FilesEngine = "local",
    address: Address = None,
    limit_patients: Limit = None,
    overwrite: Overwrite = False,
    min_votes: Annotated[int, typer.Option(help="Leave out samples with fewer votes.")] = 5,
    unvoted: Annotated[str, typer.Option(help="refuse or skip rows without a single vote.")] = "refuse",
    max_amplitude: Annotated[
        float | None,
        typer.Option(metavar="UV", help="Leave out samples that exceed this anywhere.", show_default="off"),
    ] = None,
    flat_below: Annotated[
        float | None,
        typer.Option(metavar="UV", help="Leave out samples with a channel that varies less.", show_default="off"),
    ] = None,
    scale: Annotated[float, typer.Option(help="Microvolts per stored unit; 1e6 for volts.")] = 1.0,
    vote_order: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...", help="Classes of the vote columns.", show_default="OTHER,ESZ,LPD,GPD,LRDA,GRDA"
        ),
    ] = None,
) -> None:
    """IIIC: ten seconds of EEG with expert votes."""
    from manydg.sources import iiic
    from manydg.sources.iiic import CLASSES

    order = CLASSES if vote_order is None else tuple(name.strip().upper() for name in vote_order.split(","))
    with preparing(out, engine, address):
        iiic.prepare(
            raw,
            out,
            workers=workers,
            limit_patients=limit_patients,
            overwrite=overwrite,
            min_votes=min_votes,
            unvoted=unvoted,
            max_amplitude=max_amplitude,
            flat_below=flat_below,
            scale=scale,
            vote_order=order,
        )


def synthesize_sleep_edf(
    patients: Patients,
    out: RawOut,
    seed: Seed = 0,
    hours: Annotated[float, typer.Option(help="Length of a recording.")] = 20.0,
    nights: Annotated[int, typer.Option(help="Nights of each person.")] = 2,
    study: Annotated[str, typer.Option(help="cassette or telemetry.")] = "cassette",
) -> None:
    """Write PSG and Hypnogram pairs of people who do not exist."""
    from manydg.sources import sleep_edf

    sleep_edf.synthesize(out, patients=patients, seed=seed, hours=hours, nights=nights, study=study)
    typer.echo(f"wrote {len(list(out.glob('*-PSG.edf')))} nights of {patients} people to {out}")


def synthesize_iiic(
    patients: Patients,
    out: RawOut,
    seed: Seed = 0,
    samples_per_patient: Annotated[int, typer.Option(help="On average.")] = 61,
    layout: Annotated[str, typer.Option(help="array: one large file; patients: a folder each.")] = "array",
) -> None:
    """Write EEG and expert votes of people who do not exist."""
    from manydg.sources import iiic

    iiic.synthesize(out, patients=patients, seed=seed, samples_per_patient=samples_per_patient, layout=layout)
    typer.echo(f"wrote the samples of {patients} people to {out}")
