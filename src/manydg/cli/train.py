"""``manydg train``, ``show``, ``export``, ``audit`` and ``evaluate``: one run, its settings, its model, its score."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manydg.cli._options import (
    AsJson,
    Dataset,
    Device,
    EpochLines,
    Execution,
    Log,
    Precision,
    RunOrResults,
    RunSettings,
    Tuned,
    UsedAlgorithm,
    UsedBackbone,
    console,
    figures,
    show_json,
    show_line,
)

if TYPE_CHECKING:
    from manydg.training.record import RunRecord


def register(app: typer.Typer) -> None:
    """Add the commands to ``manydg``, but for ``train``, which comes before."""
    for function in (show, export, audit, card, serve, evaluate):
        app.command()(function)


def train(
    dataset: Dataset,
    out: Annotated[Path, typer.Option(help="Run folder; an unfinished run in it is continued.")],
    *,
    algorithm: Annotated[str, typer.Option(help="Algorithm by name, or package.module:Class.")] = "manydg",
    seed: Annotated[int, typer.Option(min=0, help="Decides split, initial weights, order and dropout.")] = 0,
    settings: RunSettings,
    tuned: Tuned = None,
    device: Device = "auto",
    precision: Precision = None,
    execution: Execution = None,
    log: Log = None,
    json: AsJson = False,
) -> None:
    """Train one algorithm and score it on unseen patients.

    The patients are split into training, validation and test. The epoch is chosen on the validation patients and the
    test patients are scored once. If the command is interrupted, run it again: it resumes. To share each
    step between several processes, start it as 'torchrun --nproc-per-node N -m manydg train ...'.
    """
    from manydg.data.dataset import open_dataset
    from manydg.files import claimed
    from manydg.studies.tracking import Tracker
    from manydg.studies.tuning import with_tuned
    from manydg.training.execution import by_leader, joined
    from manydg.training.fit import Silent
    from manydg.training.run import train as train_run

    tracker = None if log is None else Tracker.of(log)
    options, data = settings.options(dataset, algorithm), open_dataset(dataset)
    if tuned is not None:
        options = with_tuned(options, tuned, data, [algorithm], [seed])
    speed = {"precision": precision, "execution": execution}
    asked = options.of(algorithm, seed).replace(**{name: value for name, value in speed.items() if value is not None})
    with joined(device) as team, ExitStack() as claims:
        by_leader(lambda: claims.enter_context(claimed(out)))
        reports = team is None or team.leads
        reporter = EpochLines() if reports else Silent()
        run = train_run(data, asked, out=out, device=device, name=dataset.resolve().name, reporter=reporter)
    if reports:
        show_json(run.record.to_json()) if json else _show_result(run.record, out)
        if tracker is not None:
            tracker.log([run.record])


def _show_result(record: RunRecord, out: Path) -> None:
    """Print which epoch was chosen, how it did on the test patients, and what was written."""
    from manydg.targets import target_of
    from manydg.training.record import cautions

    chosen = f"epoch {record.epoch}, {record.selection_rule}" if record.epoch else record.selection_rule
    console.print(f"chosen: {chosen}")
    if record.members:
        shares = (f"{member.name} {member.share:.0%}" for member in sorted(record.members, key=lambda m: -m.share))
        console.print(f"weights: {', '.join(shares)}; context: {record.context.get('mode')}")
        console.print(f"weights chosen: {record.members_rule}")
    patients, samples = record.patients.test, record.samples.test
    people = f"unseen {'synthetic ' if record.synthetic else ''}patient{'' if patients == 1 else 's'}"
    show_line(f"{patients} {people}, {samples} samples:  {figures(record.headline)}")
    for when in ("before", "after") if record.event else ():
        apart = {name: value for name, value in record.test.items() if name.endswith(f"_{when}")}
        show_line(f"{when} onset of '{record.event and record.event.name}':  {figures(apart)}")
    if record.operating:
        threshold = "" if record.threshold is None else f" {record.threshold:.4g}"
        show_line(f"at the threshold{threshold} ({record.threshold_rule}):  {figures(record.operating)}")
    metric = target_of(record.target).patient_metric if record.target else ""
    for note in cautions([record], metric):
        console.print(f"manydg: warning: {note}")
    console.print(f"wrote {out}/run.json (the record), model.safetensors, predictions.npz and split.json")


def show(
    name: Annotated[
        str | None, typer.Argument(help="A preset, an algorithm or a backbone.", show_default="list all")
    ] = None,
    json: AsJson = False,
) -> None:
    """Print the settings of a task, algorithm or backbone.

    The output is a TOML file: save it, change it, and pass it to train, compare or experiment with --config.
    """
    import tomllib

    from manydg.studies.settings import shown

    if not json:
        print(shown(name), end="")
        return
    text = shown(name)
    if name is None:
        show_json({kind: names.split(", ") for kind, _, names in (line.partition(": ") for line in text.splitlines())})
    else:
        show_json(tomllib.loads(text))


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write, such as model.onnx or model.pt2.")],
    format: Annotated[
        str | None,
        typer.Option(
            help="onnx (for onnxruntime) or torch (for torch.export.load).", show_default="torch for .pt2, else onnx"
        ),
    ] = None,
    context: Annotated[
        str,
        typer.Option(help="Patient context: state (computed by the exported model) or inputs (computed by manydg)."),
    ] = "state",
    backbone: UsedBackbone = None,
    algorithm: UsedAlgorithm = None,
    json: AsJson = False,
) -> None:
    """Write a trained model to one file that runs without manydg.

    The exported model takes inputs in the units of the dataset (signals in microvolts; spectrograms are included), any
    number of rows at a time, and returns probabilities. It is compared with the original before it is written. With
    causal patient context it takes each patient's next sample, its time and the patient's state, and also returns the
    new state; the state of a new patient is zeros.
    """
    from manydg.data.dataset import TRUST
    from manydg.files import claimed
    from manydg.training.export import export_run

    format = format or ("torch" if out.suffix == ".pt2" else "onnx")
    with claimed(out):
        written = export_run(run, out, format, context=context, backbone=backbone, algorithm=algorithm)
    if json:
        show_json({"file": str(written.path), "difference": written.difference, **written.metadata})
        return
    for name, entry in written.metadata["inputs"].items():
        shape = ", ".join(map(str, entry["shape"]))
        show_line(f"input {name}: {entry['dtype']} ({shape})")
    if TRUST in written.metadata["inputs"]:
        console.print("context is made by manydg.data.context.add_context, with the settings the file names")
    names = written.metadata["target"]["names"]
    output, *states = written.metadata["output"]
    show_line(f"output {output}: float32 (batch, {len(names)}): {', '.join(names)}")
    for state in states:
        show_line(f"output {state}: float64: the state to give with the patient's next sample; zeros at the first")
    console.print(f"wrote {written.path}; it agrees with the model within {written.difference:.1e}")


def card(
    run: RunOrResults,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write, .md or .html.")] = Path("model-card.md"),
    json: AsJson = False,
) -> None:
    """Write a run's model card: use, data, results, limits.

    The content comes from records; items that they do not contain are left open for you to fill in.
    """
    from manydg.report.card import write_card

    written = write_card(run, out)
    show_json({"card": str(written)}) if json else show_line(f"wrote {written}")


def serve(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen at; other machines' access needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that every request must send.", show_default="none on this machine"),
    ] = None,
    patients: Annotated[int, typer.Option(min=1, help="Patients whose earlier samples are kept in memory.")] = 1000,
    samples: Annotated[int, typer.Option(min=1, help="Samples kept of each patient, if the model needs them.")] = 1000,
    device: Device = "cpu",
    backbone: UsedBackbone = None,
    algorithm: UsedAlgorithm = None,
) -> None:
    """Serve predictions over HTTP (JSON or Arrow).

    Answers contain probabilities, calibrated probabilities, prediction sets, and whether the patient is unlike those in
    training. For models with patient context, earlier samples are kept in memory only: a restart loses them, and each
    answer states how many were used. The OpenAPI page is at /docs, Prometheus metrics at /metrics.
    """
    from manydg.serve import Limits, Predictor, check_address, listen, read_token, run_server
    from manydg.training.run import open_run

    token = None if token_file is None else read_token(token_file)
    check_address(host, token)
    opened = open_run(run, backbone=backbone, algorithm=algorithm, device=device)
    predictor = Predictor(opened, Limits(patients, samples))
    with listen(host, port) as listening:
        console.print(f"serving {run} at http://{host}:{port} (its OpenAPI page: /docs); stop with Ctrl-C")
        run_server(predictor, listening, token)


def audit(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    dataset: Annotated[Path, typer.Argument(help="The dataset folder it was trained on.", show_default=False)],
    json: AsJson = False,
    backbone: UsedBackbone = None,
    algorithm: UsedAlgorithm = None,
) -> None:
    """Test whether a trained model recognises patients.

    Prints how well its features, its domain factor (if it has one) and its logits identify training patients and unseen
    patients, compared with chance, and how its score changes when the directions in which patients differ are erased.
    """
    from json import dumps

    from manydg.data.dataset import open_dataset
    from manydg.data.splits import load_split
    from manydg.studies.catalogue.audit import audit_run
    from manydg.training.run import SPLIT, open_run

    opened, data = open_run(run, backbone=backbone, algorithm=algorithm), open_dataset(dataset)
    result = audit_run(opened, data, load_split(run / SPLIT, data))
    if json:
        typer.echo(dumps(result.to_json(), indent=1))
        return
    console.print(f"{result.algorithm} on {opened.record.dataset}:")
    for sentence in result.words:
        show_line(sentence)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    dataset: Annotated[
        Path,
        typer.Argument(help="Labelled dataset folder of other patients, prepared in the same way.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Also write a page: FILE.md, FILE.html or FILE.json.", show_default=False)
    ] = None,
    json: AsJson = False,
    backbone: UsedBackbone = None,
    algorithm: UsedAlgorithm = None,
) -> None:
    """Score a finished model on another labelled dataset.

    The change from the score of its own test patients is decomposed into prevalence, discrimination, patients unlike
    those in training, and calibration. Nothing is trained.
    """
    from json import dumps

    from manydg.data.dataset import open_dataset
    from manydg.errors import unknown_name
    from manydg.files import write_atomically
    from manydg.studies.external import evaluate_run
    from manydg.training.run import open_run

    if out is not None and out.suffix not in (endings := (".md", ".html", ".json")):
        raise unknown_name("kind of page", out.suffix or out.name, endings)
    opened = open_run(run, backbone=backbone, algorithm=algorithm)
    result = evaluate_run(opened, open_dataset(dataset), dataset.resolve().name)
    if json:
        show_json(result.to_json())
    else:
        for sentence in result.words:
            show_line(sentence)
    if out is not None:
        pages = {".md": result.to_markdown(), ".html": result.to_html(), ".json": dumps(result.to_json(), indent=1)}
        write_atomically(out, pages[out.suffix].encode())
        console.print(f"wrote {out}")
