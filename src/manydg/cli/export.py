"""``manydg export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write, such as model.onnx or model.pt2.")],
    format: Annotated[str, typer.Option(help="onnx (for onnxruntime) or torch (for torch.export.load).")] = "onnx",
) -> None:
    """Write a trained model to one file that runs without manydg.

    It takes the inputs in the units of the dataset (signals in microvolts: the spectrogram is part of the file), any
    number of rows at a time, and gives probabilities. The file is checked against the model before it is written.
    A model trained with patient context takes the context as further inputs, which manydg has to make.
    """
    from manydg.cli._progress import console
    from manydg.data.schema import TRUST
    from manydg.training.export import export_run

    written = export_run(run, out, format)
    for name, entry in written.metadata["inputs"].items():
        shape = ", ".join(map(str, entry["shape"]))
        print(f"input {name}: {entry['dtype']} ({shape})")
    if TRUST in written.metadata["inputs"]:
        console.print("context is made by manydg.data.context.add_context, with the settings the file names")
    names = written.metadata["target"]["names"]
    print(f"output probabilities: float32 (batch, {len(names)}): {', '.join(names)}")
    console.print(f"wrote {written.path}; it agrees with the model within {written.difference:.1e}")


def register(app: typer.Typer) -> None:
    app.command()(export)
