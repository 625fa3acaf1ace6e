"""ONNX: a model that runs without manydg and without PyTorch

Trains two small models, writes them as ONNX files and runs the files with onnxruntime. The second model uses the
earlier samples of a patient: its file takes the next sample with the patient's state, and gives the new state. Needs
the extra ``manydg[onnx]``.

On the command line:

    manydg export run --format onnx --out model.onnx
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime

import manydg
from manydg.synthetic import make_demo_dataset
from manydg.training.export import export_run


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="manydg-example-"))
    data = make_demo_dataset(patients=30, samples=10)
    run = manydg.train(data, algorithm="manydg", epochs=2)
    written = export_run(run, folder / "model.onnx")
    session = onnxruntime.InferenceSession(written.path)
    new = np.asarray(data.column("x")[:5], dtype=np.float32)
    (probabilities,) = session.run(None, {"x": new})
    print(f"{written.path}: probabilities of 5 samples\n{np.round(probabilities, 2)}")
    assert np.allclose(probabilities, run.predict_proba(data)[:5], atol=1e-4)
    with_state(folder)


def with_state(folder: Path) -> None:
    """Earlier samples of each patient are context: the state carries what is known of them."""
    rng = np.random.default_rng(0)
    patient, minute = np.repeat(np.arange(30), 10), np.tile(np.arange(10.0), 30)
    usual = rng.normal(0, 3, (30, 4))[patient]
    x = (usual + rng.normal(size=usual.shape)).astype(np.float32)
    data = manydg.from_arrays(x, x[:, 0] > usual[:, 0], patient, times=minute)
    parts = {"parts": ["relative", "difference", "before"]}
    run = manydg.train(data, algorithm="base", context="causal", context_options=parts, epochs=2)
    session = onnxruntime.InferenceSession(export_run(run, folder / "stream.onnx").path)
    size = next(entry.shape[1] for entry in session.get_inputs() if entry.name == "state")
    states = {name: np.zeros((1, size)) for name in range(30)}  # nothing is known of a new patient
    found = np.empty((len(x), 2), np.float32)
    for row in np.argsort(minute, kind="stable"):  # patients take turns, as at the bedside
        given = {"x": x[[row]], "time": minute[[row]], "state": states[patient[row]]}
        found[row], states[patient[row]] = session.run(["probabilities", "new_state"], given)
    together = run.predict_proba(x, patients=patient, times=minute)
    print(
        f"one by one with a state of {size} numbers, or together: the same, {np.allclose(found, together, atol=1e-5)}"
    )


if __name__ == "__main__":
    main()
