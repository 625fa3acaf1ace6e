"""ONNX: a model that runs without manydg and without PyTorch

Trains a small model, writes it as an ONNX file and runs the file with onnxruntime. Needs the extra ``manydg[onnx]``.

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


if __name__ == "__main__":
    main()
