"""Requests per second and the 99th percentile of ``manydg serve``, against calling the model directly.

One model without patient context and one with causal context, each asked for one sample and for a hundred at a time, by
one client and by four at once. Clients keep their connection; the server is a process of its own, as users start it.
On a machine that others use, too, the processor time of a request says more than the clock.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
                direct = [lambda i, p=predictor, s=samples: p.predict(rows(i, s))]
                measured |= times(f"{name}, direct", os.getpid(), direct)
                with served(run) as (port, process):
                    for clients in (1, 4):
                        calls = [client(port, samples, clients + position) for position in range(clients)]
                        measured |= times(f"{name}, HTTP, {clients} clients", process, calls)
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


def request(number: int, samples: int, client: int = 0) -> dict[str, list[dict[str, object]]]:
    """The next samples of one of a client's fifty patients."""
    values = np.random.default_rng(number).normal(size=(samples, FEATURES)).round(3)
    who, start = f"P{client}-{number % 50}", number // 50 * samples
    return {"samples": [{"patient": who, "time": float(start + i), "x": row.tolist()} for i, row in enumerate(values)]}


@contextmanager
def served(run: Path) -> Iterator[tuple[int, int]]:
    """A server: its port and its process."""
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
        yield port, server.pid
    finally:
        server.terminate()
        server.wait()


def client(port: int, samples: int, position: int) -> Callable[[int], None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(number: int) -> None:
        body = json.dumps(request(number, samples, position))
        connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(content.decode())

    return ask


def times(name: str, process: int, calls: Sequence[Callable[[int], object]]) -> dict[str, float | str]:
    """Requests a second, median and 99th percentile, and processor time of a request, after a second of warming up."""
    taken: list[float] = []
    total = [0] * len(calls)

    def ask(client: int) -> None:
        begin = time.perf_counter()
        while (now := time.perf_counter()) - begin < 1 + SECONDS:
            calls[client](total[client])
            total[client] += 1
            if now - begin > 1:
                taken.append(time.perf_counter() - now)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(len(calls))]
    before = processor_seconds(process)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    half, most = np.quantile(taken, [0.5, 0.99]) * 1000
    return {
        f"{name}: requests/s": round(len(taken) / SECONDS, 1),
        f"{name}: median ms": round(float(half), 2),
        f"{name}: p99 ms": round(float(most), 2),
        f"{name}: processor ms": round(1000 * (processor_seconds(process) - before) / sum(total), 2),
    }


def processor_seconds(process: int) -> float:
    """What a process of Linux has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    for what, value in main(Path()).items():
        print(f"{what}: {value}")
