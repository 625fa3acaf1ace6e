"""A trained model behind HTTP: predictions with how far to trust them, and each patient's earlier samples in memory.

:class:`Predictor` does the work and knows nothing of HTTP; :func:`create_app` puts it behind FastAPI (the extra
``serve``). What it keeps of patients is in memory alone and is lost when the server stops: every prediction says how
many earlier samples of its patient it was made with (``context_samples``), and no file is ever written.
"""

import contextlib
import dataclasses
import hmac
import math
import socket
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from manydg.data.columns import times_in
from manydg.data.context import COLUMN, stream_of, unstreamed
from manydg.data.dataset import TRUST
from manydg.data.timeline import PatientState
from manydg.errors import ConfigError, DataError, ManyDGError
from manydg.evaluation.trust import EmbeddingSums, FloatArray
from manydg.files import JsonObject, ParsedJson, reading_errors
from manydg.predict import Earlier, about, predict_samples
from manydg.sources import prediction_table
from manydg.training.run import Run, context_of

if TYPE_CHECKING:
    from fastapi import FastAPI

ARROW = "application/vnd.apache.arrow.stream"
LOCAL = ("127.0.0.1", "localhost", "::1")
PATIENT, TIME, CONTEXT_SAMPLES = "patient", "time", "context_samples"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, math.inf)
_MOST_BYTES = 64 * 2**20
_SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Limits:
    """How much is kept in memory, and how much a request may hold.

    - ``patients``: Patients whose samples are kept; beyond that the one not seen for longest is forgotten.
    - ``samples``: Of each patient, the latest so many, where samples themselves are kept.
    - ``request``: Samples of one request.
    """

    patients: int = 1000
    samples: int = 1000
    request: int = 10_000


@dataclass
class Tally:
    """What the server did since it started."""

    started: float = field(default_factory=time.time)
    requests: Counter[int] = field(default_factory=Counter)
    samples: int = 0
    forgotten: int = 0
    seconds: list[int] = field(default_factory=lambda: [0] * len(_BUCKETS))
    total_seconds: float = 0.0

    def request(self, status: int, seconds: float) -> None:
        """Count one request."""
        self.requests[status] += 1
        self.total_seconds += seconds
        self.seconds[next(i for i, limit in enumerate(_BUCKETS) if seconds <= limit)] += 1


class Predictor:
    """Predictions of a model for samples as they arrive.

    Where the model has causal context of measurements, a state of fixed size is kept of each patient
    (:class:`~manydg.data.timeline.PatientState`). Where it uses a patient's other samples in another way, those
    that arrived earlier are kept and shown to it again. A model that does not keeps nothing.
    """

    def __init__(self, run: Run, limits: Limits | None = None) -> None:
        self.run, self.limits, self.tally = run, limits or Limits(), Tally()
        roles = cast("dict[str, str | None]", run.info.get("roles") or {})
        self.gap = cast("ParsedJson", run.info.get("settings") or {}).get("session_gap")
        self.patient, self.session = roles.get("patient") or PATIENT, self.gap and roles.get("session")
        # Counted within sessions, times would put the samples of one session among those of another.
        self.time = TIME if self.session else roles.get("time") or TIME
        self.context = str(context_of(run.schema, run.algorithm).get("mode", "none"))
        self.is_table = "features" in run.schema.settings
        settings = run.schema.settings
        by_state = "context" in settings and "sequence" not in settings and unstreamed(run.schema) is None
        self.inputs = run.schema.without_context().columns
        self._stream = stream_of(run.schema) if by_state else None
        self._kept: OrderedDict[str, pl.DataFrame | _Known] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def patients(self) -> int:
        """Patients in memory."""
        return len(self._kept)

    def predict(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Predict samples: a row each, in their order.

        - ``rows``: The inputs by name, the patient of each sample, and its time where the model needs it. The columns
          are called as in training, or ``patient`` and ``time``.
        - returns: ``predicted``, ``p_NAME``, ``calibrated_NAME``, prediction sets, ``unlike_training``, ``distance``,
          and ``context_samples``: how many earlier samples of the patient were in memory.
        """
        named = self._named(rows)
        with self._lock:
            predictions = self._from_rows(named) if self._stream is None else self._from_states(named, *self._stream)
            while len(self._kept) > self.limits.patients:
                self._kept.popitem(last=False)
                self.tally.forgotten += 1
            self.tally.samples += len(rows)
        return predictions

    def _from_rows(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Predictions with the patients' earlier rows before the new ones."""
        self._dataset(rows)  # What is wrong is named by its row in the request, not among the rows that are kept.
        shown, counts = self._with_context(rows)
        predictions = predict_samples(self.run, self._dataset(shown))
        self._keep(rows)
        return prediction_table(pl.DataFrame({CONTEXT_SAMPLES: counts}), predictions).tail(len(rows))

    def _from_states(self, rows: pl.DataFrame, layout: PatientState, columns: list[str]) -> pl.DataFrame:
        """Predictions with the patients' states, which are then brought up to date."""
        data = self._dataset(rows)
        patients, times = data.domains.numpy(), cast("Tensor", data.times).numpy()
        known = [self._known(str(name), layout) for name in data.patients]
        counts = np.array([len(each) for each in known])[patients]
        values = torch.cat([cast("Tensor", data.column(name)).flatten(1) for name in columns], dim=1).numpy()
        states, context = _advance(layout, np.stack([each.state for each in known]), values, patients, times)
        added = dict(zip((COLUMN, TRUST), map(torch.from_numpy, context), strict=True))
        data = dataclasses.replace(data, columns={**data.columns, **added})
        earlier = Earlier(
            np.array([each.alarm for each in known]),
            EmbeddingSums(
                np.array([each.time for each in known]),
                np.stack([each.counts for each in known]),
                np.stack([each.embeddings for each in known]),
            ),
        )
        predictions = predict_samples(self.run, data, earlier)
        for position, name in enumerate(data.patients):
            new = states[position], earlier.embeddings.sums[position], float(earlier.alarms[position])
            self._kept[str(name)] = _Known(layout, *new)
            self._kept.move_to_end(str(name))
        return prediction_table(pl.DataFrame({CONTEXT_SAMPLES: counts}), predictions)

    def _known(self, patient: str, layout: PatientState) -> "_Known":
        calibration = self.run.calibration
        width = 0 if calibration is None or calibration.reference is None else len(calibration.reference.mean)
        nothing = _Known(layout, np.zeros(layout.size), np.zeros((2, width)), -math.inf)
        return cast("_Known", self._kept.get(patient, nothing))

    def forget(self, patient: str) -> int:
        """Drop a patient's samples from memory; how many there were."""
        with self._lock:
            kept = self._kept.pop(patient, None)
        return 0 if kept is None else len(kept)

    def _named(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows with their patient as text under one name, checked."""
        if not 0 < len(rows) <= self.limits.request:
            raise DataError(f"a request holds 1 to {self.limits.request:,} samples; this one has {len(rows):,}")
        for usual, name in {PATIENT: self.patient, TIME: self.time}.items():
            if name not in rows.columns and usual in rows.columns:
                rows = rows.rename({usual: name})
        if self.patient not in rows.columns:
            raise DataError(f"each sample needs its patient: add the column '{self.patient}'")
        if self.context == "causal" and self.time not in rows.columns:
            raise DataError(f"the model uses earlier samples: add the column '{self.time}' to each sample")
        if self.context != "none" and self.session in rows.columns:
            raise DataError(
                f"leave out '{self.session}', within which times were counted in training: '{self.time}' runs over all "
                f"of a patient's, and a pause of more than {self.gap:g} begins a new one"
            )
        if (kind := rows[self.patient].dtype).is_nested():
            raise DataError(f"'{self.patient}' has type {kind}; a patient is named by text or a number")
        if kind.is_float():
            rows = rows.with_columns(pl.col(self.patient).fill_nan(None))
        if rows[self.patient].null_count():
            raise DataError(
                f"row {rows[self.patient].is_null().arg_max()} has no '{self.patient}' (the first row is 0)"
            )
        # In one order: that of the keys of a JSON object means nothing, and earlier samples may have had another.
        return rows.with_columns(pl.col(self.patient).cast(pl.String)).select(sorted(rows.columns))

    def _with_context(self, rows: pl.DataFrame) -> tuple[pl.DataFrame, list[int]]:
        """Earlier samples of the patients before the new ones, and how many of each row's patient there were."""
        people = rows[self.patient].to_list()
        before = {name: self._rows(name) for name in dict.fromkeys(people) if name in self._kept}
        for name in before:
            self._kept.move_to_end(name)
        if not before:
            return rows, [0] * len(rows)
        try:
            shown = pl.concat([*before.values(), rows], how="vertical_relaxed")
        except pl.exceptions.PolarsError as error:
            raise DataError(f"the columns are not those of the patient's earlier samples ({error})") from None
        earlier = sum(map(len, before.values()))
        counts = [len(before[name]) if name in before else 0 for name in people]
        return shown, [0] * earlier + counts

    def _keep(self, rows: pl.DataFrame) -> None:
        if self.context == "none":
            return
        for (name,), part in rows.group_by(self.patient, maintain_order=True):
            known = [self._rows(str(name))] if name in self._kept else []
            self._kept[str(name)] = pl.concat([*known, part], how="vertical_relaxed").tail(self.limits.samples)
            self._kept.move_to_end(str(name))

    def _rows(self, patient: str) -> pl.DataFrame:
        return cast("pl.DataFrame", self._kept[patient])

    def _dataset(self, rows: pl.DataFrame) -> Any:
        patients = rows[self.patient].to_list()
        times = times_in(rows[self.time]) if self.time in rows.columns else None
        inputs = rows.drop(self.patient, self.time, strict=False)
        if self.is_table:
            return self.run.as_dataset(inputs, patients, times)
        known = self.inputs
        unknown = [name for name in inputs.columns if name not in known]
        if unknown or not inputs.columns:
            raise DataError(
                f"'{(unknown or ['nothing'])[0]}' is no input of the model; its inputs are {', '.join(known)}"
            )
        arrays = {name: _numbers(inputs[name], known[name].shape) for name in inputs.columns}
        return self.run.as_dataset(arrays, patients, times)

    def metrics(self) -> str:
        """Counters as Prometheus reads them."""
        tally, total, lines = self.tally, 0, []
        for status, number in sorted(tally.requests.items()):
            lines.append(f'manydg_requests_total{{status="{status}"}} {number}')
        for limit, number in zip(_BUCKETS, tally.seconds, strict=True):
            total += number
            shown = "+Inf" if math.isinf(limit) else f"{limit:g}"
            lines.append(f'manydg_request_seconds_bucket{{le="{shown}"}} {total}')
        lines += [f"manydg_request_seconds_sum {tally.total_seconds:.6f}", f"manydg_request_seconds_count {total}"]
        gauges = {
            "manydg_samples_total": tally.samples,
            "manydg_patients_in_memory": self.patients,
            "manydg_samples_in_memory": sum(map(len, list(self._kept.values()))),
            "manydg_patients_forgotten_total": tally.forgotten,
            "manydg_uptime_seconds": round(time.time() - tally.started, 1),
        }
        return "\n".join([*lines, *(f"{name} {value}" for name, value in gauges.items()), ""])


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of a patient from all samples so far.

    - ``state`` ``(size,)``
    - ``embeddings`` ``(2, dim)``: Sums over the samples before the time of the last one, and over all.
    - ``alarm``: When an alarm was raised last.
    """

    layout: PatientState
    state: FloatArray
    embeddings: FloatArray
    alarm: float

    @property
    def counts(self) -> FloatArray:
        """Samples before the time of the last one, and all."""
        return self.state[[self.layout.fields[name].start for name in ("samples_before", "samples")]]

    @property
    def time(self) -> float:
        """Of the last sample."""
        return float(self.state[self.layout.fields["time"].start]) if len(self) else -math.inf

    def __len__(self) -> int:
        return int(self.counts[1])


def _numbers(column: pl.Series, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Values ``(samples, *shape)`` of an input."""
    values = [_array(value) for value in column.to_list()]
    for row, value in enumerate(values):
        if value is None or value.shape != shape:
            wanted = f"{' x '.join(map(str, shape))} numbers" if shape else "one number"
            raise DataError(f"row {row} (the first row is 0): '{column.name}' needs {wanted}, as in training")
    return np.stack(cast("list[npt.NDArray[np.float32]]", values))


def _array(value: Any) -> npt.NDArray[np.float32] | None:
    """A value as numbers; ``None`` for text, objects and lists of different lengths."""
    try:
        return np.array(value, np.float32)
    except (TypeError, ValueError, OverflowError):
        return None


def _advance(
    layout: PatientState, states: FloatArray, values: npt.NDArray[Any], patients: npt.NDArray[Any], times: FloatArray
) -> tuple[FloatArray, tuple[npt.NDArray[np.float32], ...]]:
    """States ``(patients, size)`` after some samples, and the context of each sample and its weight."""
    order = np.lexsort((times, patients))
    starts = np.searchsorted(patients[order], np.arange(len(states)))
    rank = np.arange(len(order)) - starts[patients[order]]
    made: list[tuple[Any, ...]] = []
    rounds = [order[rank == number] for number in range(int(rank.max()) + 1)]
    for rows in rounds:
        who: Any = patients[rows]
        last, samples = (layout.part(states[who], name)[:, 0] for name in ("time", "samples"))
        if (late := np.flatnonzero((samples > 0) & (times[rows] < last))).size:
            row = int(rows[late[0]])
            raise DataError(
                f"row {row} is of time {times[row]:g}, and the patient's last sample was of {last[late[0]]:g}: send "
                "samples in the order of time, or POST /forget and all samples of the patient again"
            )
        *context, states[who] = layout.step(states[who], values[rows], times[rows])
        made.append(tuple(context))
    back = np.argsort(np.concatenate(rounds))
    return states, tuple(np.concatenate(each)[back] for each in zip(*made, strict=True))


def check_address(host: str, token: str | None) -> None:
    """Raise if a server would be open to others without a token."""
    if host not in LOCAL and not token:
        raise ConfigError(f"--host {host} is open to other machines: give a token with --token-file")


def read_token(path: Path) -> str:
    """The token in a file: its first line."""
    with reading_errors(path):
        token = path.read_text(encoding="utf-8").strip()
    if len(token) < _SHORTEST_TOKEN or len(token.split()) != 1:
        raise ConfigError(f"{path} holds no token: write one word of {_SHORTEST_TOKEN} characters or more into it")
    return token


def create_app(predictor: Predictor, token: str | None = None) -> "FastAPI":
    """The predictor behind HTTP.

    ``POST /predict`` takes JSON or Arrow and gives either; ``POST /forget`` drops a patient's samples; ``GET /model``,
    ``/health`` and ``/metrics`` (Prometheus); ``/docs`` is the OpenAPI page. With a token every request but ``/health``
    needs it, as ``Authorization: Bearer TOKEN``.
    """
    try:
        from fastapi import FastAPI
    except ImportError:
        raise ConfigError("'manydg serve' needs the package 'fastapi': pip install 'manydg[serve]'") from None
    app = FastAPI(title="manydg", version=predictor.run.record.run, description=cast("str", create_app.__doc__))
    _guard(app, predictor, token)
    _add_status(app, predictor)
    _add_predictions(app, predictor)
    return app


def _guard(app: "FastAPI", predictor: Predictor, token: str | None) -> None:
    """Every request is checked, counted and answered with one line where it is wrong."""
    from fastapi import Request, Response
    from fastapi.responses import JSONResponse

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        start, given = time.perf_counter(), request.headers.get("authorization", "")
        allowed = token is None or request.url.path == "/health"
        if not allowed and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            answer: Response = JSONResponse({"error": "the token is missing or wrong"}, 401)
        elif int(request.headers.get("content-length") or 0) > _MOST_BYTES:
            answer = JSONResponse({"error": f"a request has at most {_MOST_BYTES:,} bytes"}, 413)
        else:
            answer = await call_next(request)
        predictor.tally.request(answer.status_code, time.perf_counter() - start)
        return answer

    @app.exception_handler(ManyDGError)
    async def refused(request: Request, error: ManyDGError) -> Response:
        return JSONResponse({"error": " ".join(str(error).split())}, 422)


def _add_status(app: "FastAPI", predictor: Predictor) -> None:
    from fastapi.responses import PlainTextResponse

    @app.get("/health", summary="Whether the server answers, and with which model")
    def health() -> dict[str, str | int]:
        record = predictor.run.record
        return {
            "status": "ok",
            "run": record.run,
            "algorithm": record.algorithm,
            "context": predictor.context,
            "patients in memory": predictor.patients,
        }

    @app.get("/metrics", summary="Counters for Prometheus", response_class=PlainTextResponse)
    def metrics() -> str:
        return predictor.metrics()

    @app.get("/model", summary="What the model is, how well it did, and what the columns mean")
    def model() -> dict[str, Any]:
        facts: JsonObject = about(predictor.run)
        inputs = ["(columns of the training table)"] if predictor.is_table else list(predictor.inputs)
        return {**facts, "inputs": inputs, "patient column": predictor.patient, "time column": predictor.time}


def _add_predictions(app: "FastAPI", predictor: Predictor) -> None:
    from fastapi import Request, Response
    from fastapi.concurrency import run_in_threadpool

    example = {"samples": [{predictor.patient: "A", predictor.time: 0.0, "x": [0.1, 0.2]}]}
    body = {"content": {"application/json": {"schema": {"type": "object", "example": example}}, ARROW: {}}}
    documented = {"requestBody": {"required": True, **body}}

    @app.post("/predict", summary="Predict samples (JSON or an Arrow stream)", openapi_extra=documented)
    async def predict(request: Request) -> Response:
        rows = read_rows(await _body(request), request.headers.get("content-type", ""))
        table = await run_in_threadpool(predictor.predict, rows)
        if ARROW in request.headers.get("accept", ""):
            return Response(table.write_ipc_stream(None).getvalue(), media_type=ARROW)
        return Response(f'{{"predictions": {table.write_json()}}}', media_type="application/json")

    @app.post("/forget", summary="Drop a patient's samples from memory")
    async def forget(request: Request) -> dict[str, int]:
        asked = parsed(await _body(request))
        if not isinstance(asked, dict) or "patient" not in asked:
            raise DataError('name the patient: {"patient": "ID"}')
        return {"samples dropped": predictor.forget(str(asked["patient"]))}


async def _body(request: Any) -> bytes:
    """What a request holds, also where it does not say how much."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _MOST_BYTES:
            raise DataError(f"a request has at most {_MOST_BYTES:,} bytes")
    return bytes(content)


def parsed(content: bytes) -> Any:
    """JSON of a request."""
    import json

    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise DataError("the request is not JSON") from None


def read_rows(content: bytes, kind: str) -> pl.DataFrame:
    """Samples of a request: ``{"samples": [{...}, ...]}``, or an Arrow stream."""
    if ARROW in kind:
        try:
            return pl.read_ipc_stream(content)
        # Polars panics at some damaged streams, which is no Exception to Python.
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
            raise DataError(f"the request is not an Arrow stream ({error})") from None
    asked = parsed(content)
    samples = asked.get("samples") if isinstance(asked, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise DataError('send {"samples": [{"patient": "A", ...}, ...]}, one object for each sample')
    try:
        return pl.DataFrame(samples, infer_schema_length=None)
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        raise DataError(f"the samples are no table: {error}") from None


def listen(host: str, port: int) -> socket.socket:
    """The socket of an address, which no other process listens at."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (")[0]
        raise ConfigError(f"cannot listen at {host}:{port} ({reason}): give another --port or --host") from None


def run_server(predictor: Predictor, listening: socket.socket, token: str | None) -> None:
    """Serve until the process is stopped."""
    app = create_app(predictor, token)
    try:
        import uvicorn
    except ImportError:
        raise ConfigError("'manydg serve' needs the package 'uvicorn': pip install 'manydg[serve]'") from None
    # Paths and patients are not for logs.
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    with contextlib.suppress(KeyboardInterrupt):
        server.run([listening])
