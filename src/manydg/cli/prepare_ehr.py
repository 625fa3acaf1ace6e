"""``manydg prepare`` and ``manydg synthesize`` for health records: mimic3, eicu and meds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manydg.cli._options import Address, FilesEngine
from manydg.cli._prepared import Overwrite, preparing

Raw = Annotated[Path, typer.Argument(help="Folder with the raw files.")]
Out = Annotated[Path, typer.Option("--out", help="Dataset folder to write.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that read tables or files.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Keep only this many patients.")]
MinEvents = Annotated[int, typer.Option(min=1, help="Leave out samples with fewer events.")]
MaxEvents = Annotated[int, typer.Option(min=0, help="Keep only the last so many events of a sample; 0 for all.")]
MinCount = Annotated[int, typer.Option(min=1, help="A code in fewer rows counts as unknown.")]
Patients = Annotated[int, typer.Option("--patients", min=2, help="How many patients.")]
Seed = Annotated[int, typer.Option("--seed", help="The same seed writes the same files.")]
NewFolder = Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist yet.")]
Ending = Annotated[str, typer.Option("--ending", help="How the tables are stored: .csv.gz or .csv.")]


def register_prepare(app: typer.Typer) -> None:
    """Add ``mimic3``, ``eicu`` and ``meds`` to ``manydg prepare``."""
    app.command("mimic3")(prepare_mimic3)
    app.command("eicu")(prepare_eicu)
    app.command("meds")(prepare_meds)


def register_synthesize(app: typer.Typer) -> None:
    """Add ``mimic3``, ``eicu`` and ``meds`` to ``manydg synthesize``."""
    app.command("mimic3")(synthesize_mimic3)
    app.command("eicu")(synthesize_eicu)
    app.command("meds")(synthesize_meds)


def prepare_mimic3(
    raw: Raw,
    out: Out,
    ndc_map: Annotated[Path, typer.Option("--ndc-map", help="CSV table with the columns ndc and atc.")],
    workers: Workers = 1,
    engine: FilesEngine = "local",
    address: Address = None,
    limit_patients: Limit = None,
    min_visits: Annotated[int, typer.Option(min=1, help="Complete visits a patient must have.")] = 2,
    max_diagnoses: Annotated[
        int, typer.Option(min=0, help="Keep the most frequent diagnosis codes of the table; 0 for all.")
    ] = 2000,
    drugs: Annotated[Path | None, typer.Option(help="Text file of the drug classes to keep.")] = None,
    ddi: Annotated[Path | None, typer.Option(help="Table of drug interactions.")] = None,
    ddi_atc: Annotated[Path | None, typer.Option(help="ATC codes of the compounds in --ddi.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """MIMIC-III: which drugs a visit's prescriptions hold."""
    from manydg.sources import mimic3

    with preparing(out, engine, address):
        mimic3.prepare(
            raw,
            out,
            ndc_map=ndc_map,
            workers=workers,
            limit_patients=limit_patients,
            min_visits=min_visits,
            max_diagnoses=max_diagnoses or None,
            drugs=drugs,
            ddi=ddi,
            ddi_atc=ddi_atc,
            overwrite=overwrite,
        )


def prepare_eicu(
    raw: Raw,
    out: Out,
    without: Annotated[
        list[str], typer.Option("--without", help="Event table to do without; may be given several times.")
    ] = [],  # noqa: B006
    workers: Workers = 1,
    engine: FilesEngine = "local",
    address: Address = None,
    limit_patients: Limit = None,
    within_days: Annotated[float, typer.Option(help="The next stay starts within so many days.")] = 15.0,
    min_gap: Annotated[float, typer.Option(help="Minutes between the end of this stay and the next.")] = 0.0,
    min_events: MinEvents = 1,
    max_events: MaxEvents = 300,
    min_count: MinCount = 1,
    overwrite: Overwrite = False,
) -> None:
    """eICU: will the patient come back to intensive care."""
    from manydg.sources import eicu

    with preparing(out, engine, address):
        eicu.prepare(
            raw,
            out,
            without=without,
            workers=workers,
            limit_patients=limit_patients,
            within_days=within_days,
            min_gap=min_gap,
            min_events=min_events,
            max_events=max_events or None,
            min_count=min_count,
            overwrite=overwrite,
        )


def prepare_meds(
    raw: Raw,
    out: Out,
    labels: Annotated[Path, typer.Option("--labels", help="MEDS label file, or a folder of them.")],
    kinds: Annotated[
        str, typer.Option(help="'prefix': what stands before // is the kind of event; or 'one'.")
    ] = "prefix",
    workers: Workers = 1,
    engine: FilesEngine = "local",
    address: Address = None,
    limit_patients: Limit = None,
    min_events: MinEvents = 1,
    max_events: MaxEvents = 300,
    min_count: MinCount = 1,
    overwrite: Overwrite = False,
) -> None:
    """MEDS: any dataset of the standard, any of its label files."""
    from manydg.sources import meds

    with preparing(out, engine, address):
        meds.prepare(
            raw,
            out,
            labels=labels,
            kinds=kinds,
            workers=workers,
            limit_patients=limit_patients,
            min_events=min_events,
            max_events=max_events or None,
            min_count=min_count,
            overwrite=overwrite,
        )


def synthesize_mimic3(out: NewFolder, patients: Patients, seed: Seed = 0, ending: Ending = ".csv.gz") -> None:
    """A synthetic MIMIC-III, with its NDC mapping."""
    from manydg.sources import mimic3

    typer.echo(f"wrote {mimic3.synthesize(out, patients=patients, seed=seed, ending=ending)}")


def synthesize_eicu(out: NewFolder, patients: Patients, seed: Seed = 0, ending: Ending = ".csv.gz") -> None:
    """A synthetic eICU."""
    from manydg.sources import eicu

    typer.echo(f"wrote {eicu.synthesize(out, patients=patients, seed=seed, ending=ending)}")


def synthesize_meds(out: NewFolder, patients: Patients, seed: Seed = 0) -> None:
    """A synthetic MEDS dataset with a label file."""
    from manydg.sources import meds

    typer.echo(f"wrote {meds.synthesize(out, patients=patients, seed=seed)}")
