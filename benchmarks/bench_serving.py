"""Requests per second and the 99th percentile of ``manydg serve``, against calling the model directly.

One model without patient context and one with causal context, each asked for one sample and for a hundred at a time, by
one client and by four at once. Clients keep their connection; the server is a process of its own, as users start it.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl

import manydg
from manydg.serve import Predictor
from manydg.training.run import open_run

SECONDS = 4.0
FEATURES = 30


def main(out: Path) -> dict[str, float | str]:
    measured: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for context in ("none", "causal"):
            run = train(Path(folder) / context, context)
            for samples in (1, 100):
                predictor, name = Predictor(open_run(run)), f"{context} context, {samples} samples a request"
                measured |= times(f"{name}, direct", 1, lambda i, p=predictor, s=samples: p.predict(rows(i, s)))
                with served(run) as port:
                    for clients in (1, 4):
                        calls = [client(port, samples, position) for position in range(clients)]
                        measured |= times(f"{name}, HTTP, {clients} clients", clients, *calls)
    return measured


def train(folder: Path, context: str) -> Path:
    rng = np.random.default_rng(0)
    patients, minutes = np.repeat(np.arange(100), 40), np.tile(np.arange(40.0), 100)
    x = rng.normal(size=(4000, FEATURES)).astype(np.float32)
    data = manydg.from_arrays(x, x[:, 0] > 0, patients, times=minutes)
    options = {} if context == "none" else {"context_options": {"parts": ["relative", "difference"]}}
    manydg.train(data, algorithm="base", epochs=2, context=context, out=folder, device="cpu", **options)
    return folder


def rows(number: int, samples: int) -> pl.DataFrame:
    return pl.DataFrame(request(number, samples)["samples"])


def request(number: int, samples: int) -> dict[str, list[dict[str, object]]]:
    """The next samples of one of fifty patients."""
    values = np.random.default_rng(number).normal(size=(samples, FEATURES)).round(3)
    who, start = f"P{number % 50}", number // 50 * samples
    return {"samples": [{"patient": who, "time": float(start + i), "x": row.tolist()} for i, row in enumerate(values)]}


@contextmanager
def served(run: Path) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    server = subprocess.Popen([sys.executable, "-m", "manydg", "--quiet", "serve", str(run), "--port", str(port)])
    try:
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                connection.getresponse().read()
                break
            except OSError:
                time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


def client(port: int, samples: int, position: int) -> Callable[[int], None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(number: int) -> None:
        body = json.dumps(request(1_000_000 * position + number, samples))
        connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(content.decode())

    return ask


def times(name: str, clients: int, *calls: Callable[[int], object]) -> dict[str, float | str]:
    """Requests a second and the median and 99th percentile in milliseconds, after a second of warming up."""
    taken: list[float] = []

    def ask(call: Callable[[int], object]) -> None:
        number, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) - begin < 1 + SECONDS:
            call(number)
            number += 1
            if now - begin > 1:
                taken.append(time.perf_counter() - now)

    threads = [threading.Thread(target=ask, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    half, most = np.quantile(taken, [0.5, 0.99]) * 1000
    return {
        f"{name}: requests/s": round(len(taken) / SECONDS, 1),
        f"{name}: median ms": round(float(half), 2),
        f"{name}: p99 ms": round(float(most), 2),
    }


if __name__ == "__main__":
    for what, value in main(Path()).items():
        print(f"{what}: {value}")
