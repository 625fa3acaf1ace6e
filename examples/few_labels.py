"""Few labels: a model that learns from five labelled samples of the new patient

A patient may be scored by hand for a few minutes. ``personalise`` uses these labels for the rest of the recording.
How much it trusts them was chosen on validation patients.
"""

from __future__ import annotations

import numpy as np

from manydg import ManyDGClassifier

PATIENTS, SAMPLES, LABELLED = 60, 40, 5


def main() -> None:
    rng = np.random.default_rng(0)
    patients = np.repeat(np.arange(PATIENTS), SAMPLES)
    level = rng.normal(scale=1.5, size=PATIENTS)[patients]  # where each patient's own zero is
    x = rng.normal(size=(len(patients), 3))
    y = (x[:, 0] + level + 0.3 * rng.normal(size=len(patients)) > 0).astype(int)

    new = patients >= 45
    model = ManyDGClassifier(algorithm="base", epochs=8, lr=3e-3).fit(x[~new], y[~new], groups=patients[~new])

    first = new & (np.arange(len(patients)) % SAMPLES < LABELLED)
    rest = new & ~first
    personal = model.personalise(x[first], y[first], patients[first])
    for name, guess in (
        ("no label", model.predict(x[rest])),
        (f"{LABELLED} labels of each patient", personal.predict(x[rest], groups=patients[rest])),
    ):
        print(f"{name}: {np.mean(guess == y[rest]):.0%} of the other samples are right")


if __name__ == "__main__":
    main()
