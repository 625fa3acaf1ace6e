"""``manydg predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    raw: Annotated[Path, typer.Argument(help="New raw files, as those the model was trained on.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Where the predictions go; a folder that does not exist yet.")],
    ndc_map: Annotated[Path | None, typer.Option(help="MIMIC-III: mapping from NDC to ATC.")] = None,
    times: Annotated[Path | None, typer.Option(help="MEDS: parquet file of prediction times.")] = None,
    resample: Annotated[bool, typer.Option("--resample", help="EDF: bring another rate to the model's.")] = False,
) -> None:
    """Predict new raw files with a trained model."""
    import json

    from manydg.cli._progress import console
    from manydg.predict import ABOUT, PredictOptions, predict_raw

    for path in predict_raw(run, raw, out, PredictOptions(ndc_map, times, resample)):
        console.print(f"wrote {path}", soft_wrap=True)
    decision = json.loads((out / ABOUT).read_text(encoding="utf-8"))["decision"]["in words"]
    console.print(f"{decision}; {out / ABOUT} says more", soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command()(predict)
