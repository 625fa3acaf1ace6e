"""A model behind HTTP answers as it answers directly, remembers patients within its limits, and keeps strangers out."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import uvicorn

import manydg
from manydg.data.context import COLUMN, stream_of
from manydg.data.dataset import TRUST
from manydg.data.info import DatasetInfo, EventSpec
from manydg.data.timeline import PARTS
from manydg.errors import ConfigError, DataError
from manydg.predict import predict_raw, predict_samples
from manydg.serve import ARROW, Limits, Predictor, _advance, check_address, create_app, listen, read_rows, read_token
from manydg.sources import prepare
from manydg.training.inference import predict_probabilities
from manydg.training.run import Run, open_run

TOKEN = "a-token-of-some-length"


def _patients(count: int = 24, samples: int = 10) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    patients = np.repeat(np.arange(count), samples)
    x = rng.normal(size=(count * samples, 3)).astype(np.float32) + rng.normal(size=(count, 3))[patients].astype(
        np.float32
    )
    return (
        x,
        np.where(x[:, 0] + rng.normal(size=len(x)) > 0, "yes", "no"),
        patients,
        np.tile(np.arange(samples), count).astype(float),
    )


def _train(folder: Path, **options: Any) -> Run:
    x, labels, patients, times = _patients()
    data = manydg.from_arrays(x, labels, patients, times=times)
    manydg.train(data, algorithm="base", epochs=2, out=folder, device="cpu", **options)
    return open_run(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _train(tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _train(
        tmp_path_factory.mktemp("causal") / "run",
        context="causal",
        context_options={"parts": ["relative", "difference"]},
    )


@contextmanager
def served(predictor: Predictor, token: str | None = None) -> Iterator[int]:
    """A real server at a port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    server = uvicorn.Server(
        uvicorn.Config(create_app(predictor, token), host="127.0.0.1", port=port, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()


def ask(port: int, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, body, named)
    answer = connection.getresponse()
    return answer.status, answer.read()


def samples(start: int, end: int, patient: str = "new") -> list[dict[str, Any]]:
    x, _, _, times = _patients()
    return [{"patient": patient, "time": float(times[row]), "x": x[row].tolist()} for row in range(start, end)]


def test_an_answer_over_http_is_that_of_the_model_itself(plain: Run) -> None:
    rows = samples(0, 6)
    with served(Predictor(plain)) as port:
        status, content = ask(port, "/predict", json.dumps({"samples": rows}).encode())
        assert status == 200
        answered = json.loads(content)["predictions"]
        _, model = ask(port, "/model")
        status, page = ask(port, "/docs")
        assert (status, b"swagger" in page.lower()) == (200, True)
    inputs = np.array([row["x"] for row in rows], np.float32)
    direct = predict_samples(plain, plain.as_dataset(inputs, ["new"] * 6, None))
    assert [row["p_yes"] for row in answered] == pytest.approx(direct.probabilities[:, 1].tolist(), abs=1e-5)
    assert [row["calibrated_yes"] for row in answered] == pytest.approx(direct.trust["calibrated_yes"])
    assert [row["predicted"] for row in answered] == direct.decisions
    for name in ("set_", "unlike_training", "distance"):
        assert any(key.startswith(name) for key in answered[0]), name
    assert json.loads(model)["how well it did on patients it had not seen"]["patients"] == plain.record.patients.test


def test_arrow_goes_in_and_out(plain: Run) -> None:
    frame = pl.DataFrame(samples(0, 4))
    with served(Predictor(plain)) as port:
        body = frame.write_ipc_stream(None).getvalue()
        status, content = ask(port, "/predict", body, Content_Type=ARROW, Accept=ARROW)
        _, as_json = ask(port, "/predict", json.dumps({"samples": samples(0, 4)}).encode())
    assert status == 200
    table = pl.read_ipc_stream(content)
    assert table["p_yes"].to_list() == pytest.approx([row["p_yes"] for row in json.loads(as_json)["predictions"]])


@pytest.fixture(scope="module")
def alarming(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Foresees an event from measurements that are often missing, with every part of causal context."""
    rng = np.random.default_rng(1)
    patients, hours = np.repeat(np.arange(24), 15), np.tile(np.arange(15.0), 24)
    x = (rng.normal(size=(360, 4)) + 2 * rng.normal(size=(24, 4))[patients]).astype(np.float32)
    x[np.arange(360), rng.integers(0, 4, 360)] = np.nan
    info = DatasetInfo(event=EventSpec("onset", 3.0, 24.0))
    onset = np.where(patients % 2, 15.0, np.nan)
    data = manydg.from_arrays(x, onset - hours <= 3, patients, times=hours, missing=True, info=info)
    data = dataclasses.replace(data, metadata={"onset": torch.from_numpy(onset)})
    folder = tmp_path_factory.mktemp("alarming") / "run"
    options = {"parts": PARTS["causal"], "gap": 4.0, "scales": (1, 2)}
    manydg.train(data, algorithm="base", epochs=1, context="causal", context_options=options, out=folder, device="cpu")
    run = open_run(folder)
    # So that half of the samples would raise an alarm, were it not for the silence after one.
    return dataclasses.replace(
        run, record=run.record.replace(threshold=float(np.median(run.predict_proba(data)[:, 1])))
    )


def requests(seed: int) -> list[list[dict[str, Any]]]:
    """Samples of three patients, in requests of one to nine rows that are in no order, some of equal times."""
    rng = np.random.default_rng(seed)
    rows = [
        {"patient": f"p{who}", "time": hour + 6.0 * (hour > 8), "x": [*rng.normal(size=3), rng.choice([None, 1.0])]}
        for hour in np.sort(rng.integers(0, 12, 40))
        for who in rng.permutation(3)[: rng.integers(0, 3)]
    ]
    cuts = np.sort(rng.integers(0, len(rows), 12))
    parts = [rows[start:end] for start, end in itertools.pairwise([0, *cuts.tolist(), len(rows)]) if start < end]
    return [[part[position] for position in rng.permutation(len(part))] for part in parts]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_stream_of_requests_gets_what_predict_gives_all_samples_together(alarming: Run, seed: int) -> None:
    asked, predictor = requests(seed), Predictor(alarming)
    answers = pl.concat([predictor.predict(pl.DataFrame(rows, infer_schema_length=None)) for rows in asked])
    every = [row for rows in asked for row in rows]
    x = np.array([row["x"] for row in every], np.float32)
    data = alarming.as_dataset(x, [row["patient"] for row in every], np.array([row["time"] for row in every]))
    expected = predict_samples(alarming, data)
    np.testing.assert_allclose(
        answers.select(pl.col("^p_.*$")).to_numpy(), expected.probabilities.round(5), atol=1.01e-5
    )
    assert answers["alarm"].to_list() == expected.trust["alarm"]
    assert 0 < sum(expected.trust["alarm"]) < len(every)
    assert answers["distance"].to_list() == pytest.approx(expected.trust["distance"], abs=2e-3)
    before = [sum(row["patient"] == one["patient"] for rows in asked[:number] for row in rows)
              for number, part in enumerate(asked) for one in part]  # fmt: skip
    assert answers["context_samples"].to_list() == before


def test_the_probabilities_of_a_stream_are_those_of_all_samples_together(alarming: Run) -> None:
    asked = requests(2)
    every = [row for rows in asked for row in rows]
    x, times = np.array([row["x"] for row in every], np.float32), np.array([row["time"] for row in every])
    plain = alarming.as_dataset(x, [row["patient"] for row in every], times)
    (layout, _), who, start = stream_of(alarming.schema), plain.domains.numpy(), 0
    states, parts = np.zeros((3, layout.size)), []
    for rows in asked:
        part = slice(start, start + len(rows))
        codes, local = np.unique(who[part], return_inverse=True)
        states[codes], context = _advance(layout, states[codes], x[part], local, times[part])
        parts.append(context)
        start += len(rows)
    context, weight = (torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True))
    made = dataclasses.replace(plain, columns={**plain.columns, COLUMN: context, TRUST: weight})
    found, expected = (predict_probabilities(alarming.algorithm, alarming.prepare(data)) for data in (made, plain))
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)


def test_samples_that_arrive_one_by_one_get_what_they_get_together(causal: Run) -> None:
    rows = samples(0, 8)
    together = Predictor(causal).predict(pl.DataFrame(rows))
    predictor = Predictor(causal)
    alone = [predictor.predict(pl.DataFrame([row])) for row in rows]
    assert [table["context_samples"][0] for table in alone] == list(range(8))
    assert [table["p_yes"][0] for table in alone] == pytest.approx(together["p_yes"].to_list(), abs=1e-5)
    assert [table["distance"][0] for table in alone] == pytest.approx(together["distance"].to_list(), abs=1e-3)
    fresh = Predictor(causal).predict(pl.DataFrame(rows[-1:]))
    assert fresh["context_samples"][0] == 0  # a restart forgets, and says so
    assert fresh["p_yes"][0] != pytest.approx(together["p_yes"][-1], abs=1e-4)


def test_the_patient_not_seen_for_longest_is_forgotten(causal: Run) -> None:
    predictor = Predictor(causal, Limits(patients=2))
    for start, name in enumerate(("a", "b", "a", "c")):
        predictor.predict(pl.DataFrame(samples(2 * start, 2 * start + 2, name)))
    assert predictor.patients == 2
    counts = {name: predictor.predict(pl.DataFrame(samples(9, 10, name)))["context_samples"][0] for name in ("a", "c")}
    assert counts == {"a": 4, "c": 2}
    assert predictor.predict(pl.DataFrame(samples(5, 6, "b")))["context_samples"][0] == 0
    assert predictor.tally.forgotten == 2
    assert predictor.forget("b") == 1
    assert predictor.forget("b") == 0


def test_a_patient_takes_the_same_memory_after_any_number_of_samples(alarming: Run) -> None:
    predictor, sizes = Predictor(alarming), []
    for hour in range(60):
        predictor.predict(pl.DataFrame([{"patient": "a", "time": float(hour), "x": [1.0, 2.0, 3.0, hour]}]))
        (known,) = predictor._kept.values()
        sizes.append(known.state.nbytes + known.embeddings.nbytes)  # type: ignore[union-attr]
    assert len(set(sizes)) == 1
    assert "manydg_samples_in_memory 60" in predictor.metrics()


def test_a_sample_that_is_late_or_infinite_is_refused_and_changes_nothing(alarming: Run) -> None:
    predictor = Predictor(alarming)
    predictor.predict(pl.DataFrame([{"patient": "a", "time": 5.0, "x": [1.0, 2.0, 3.0, 4.0]}]))
    later = {"patient": "a", "time": 6.0, "x": [2.0, 2.0, 3.0, 4.0]}
    for wrong, said in (
        ({**later, "time": 4.0}, "row 0 is of time 4, and the patient's last sample was of 5: send samples in the ord"),
        ({**later, "x": [1.0, 2.0, 3.0, float("inf")]}, "not finite"),
    ):
        with pytest.raises(DataError, match=said):
            predictor.predict(pl.DataFrame([wrong, {**later, "patient": "b"}]))
    assert predictor.patients == 1
    assert predictor.predict(pl.DataFrame([later]))["context_samples"].to_list() == [1]


def test_stored_samples_are_bounded_where_the_context_is_offline(tmp_path: Path) -> None:
    predictor = Predictor(_train(tmp_path / "run", context="offline"), Limits(samples=3))
    for start in (0, 2):
        predictor.predict(pl.DataFrame(samples(start, start + 2)))
    assert predictor.predict(pl.DataFrame(samples(5, 6)))["context_samples"].to_list() == [3]


def test_the_order_of_keys_and_what_comes_after_a_wrong_request_do_not_matter(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", context="offline")
    straight, turned = Predictor(run), Predictor(run)
    for start in (0, 2):
        given = samples(start, start + 2)
        other = given if start else [dict(reversed(one.items())) for one in given]
        assert turned.predict(pl.DataFrame(other)).equals(straight.predict(pl.DataFrame(given)))
    timeless = {name: value for name, value in samples(4, 5)[0].items() if name != "time"}
    with pytest.raises(DataError, match="the columns are not those of the patient's earlier samples"):
        turned.predict(pl.DataFrame([timeless]))
    with pytest.raises(DataError, match="'y' is no input of the model"):
        turned.predict(pl.DataFrame([{**samples(4, 5)[0], "y": 1.0}]))
    assert turned.predict(pl.DataFrame(samples(4, 5))).equals(straight.predict(pl.DataFrame(samples(4, 5))))


def test_a_wrong_value_is_named_by_its_row_in_the_request(tmp_path: Path) -> None:
    predictor = Predictor(_train(tmp_path / "run", context="offline", context_options={"parts": ["relative"]}))
    predictor.predict(pl.DataFrame(samples(0, 3)))
    for wrong in ([0.0, float("nan"), 0.0], [0.0]):
        rows = pl.DataFrame([*samples(3, 4), {**samples(4, 5)[0], "x": wrong}])
        with pytest.raises(DataError, match="row 1"):
            predictor.predict(rows)


def test_samples_of_nobody_are_not_kept_as_those_of_one_person(causal: Run) -> None:
    predictor = Predictor(causal)
    with pytest.raises(DataError, match="row 1 has no 'patient'"):
        predictor.predict(pl.DataFrame([{**samples(0, 1)[0], "patient": each} for each in (1.0, float("nan"))]))
    assert predictor.patients == 0


def test_a_model_without_context_keeps_nothing_of_anybody(plain: Run) -> None:
    predictor = Predictor(plain)
    predictor.predict(pl.DataFrame(samples(0, 5)))
    assert predictor.patients == 0


def test_without_the_token_only_the_health_is_told(plain: Run) -> None:
    body = json.dumps({"samples": samples(0, 1)}).encode()
    with served(Predictor(plain), TOKEN) as port:
        assert ask(port, "/predict", body)[0] == 401
        assert ask(port, "/predict", body, Authorization="Bearer another-one-of-these")[0] == 401
        assert ask(port, "/metrics")[0] == 401
        assert ask(port, "/health")[0] == 200
        assert ask(port, "/predict", body, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_an_address_where_another_listens_is_said_in_one_line() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match=r"cannot listen at .* another --port"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_another_host_needs_a_token_and_a_token_is_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--token-file"):
        check_address("0.0.0.0", None)
    check_address("0.0.0.0", TOKEN)
    check_address("127.0.0.1", None)
    file = tmp_path / "token"
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="16 characters or more"):
        read_token(file)
    file.write_text(TOKEN + "\n")
    assert read_token(file) == TOKEN


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"{}", "one object for each sample"),
        (b'{"samples": []}', "1 to 10,000 samples"),
        (b'{"samples": [{"x": [1, 2, 3]}]}', "each sample needs its patient"),
        (b'{"samples": [{"patient": "a", "y": 1}]}', "'y' is no input of the model; its inputs are x"),
        (b'{"samples": [{"patient": null, "x": [1, 2, 3]}]}', "row 0 has no 'patient'"),
        (b'{"samples": [{"patient": ["a"], "x": [1, 2, 3]}]}', "'patient' has type List(String)"),
        (b'{"samples": [{"patient": "a", "x": "high"}]}', "row 0 (the first row is 0): 'x' needs 3 numbers"),
        (b'{"samples": [{"patient": "a", "x": ["low", "high", ""]}]}', "'x' needs 3 numbers"),
        (b'{"samples": [{"patient": "a", "x": {"y": 1}}]}', "'x' needs 3 numbers"),
        (b'{"samples": [{"patient": "a", "x": [1, 2, 3]}, {"patient": "a"}]}', "row 1 (the first row is 0): 'x'"),
        (b'{"samples": [{"patient": "a", "x": [1, 2, 3]}, {"patient": "a", "x": [1]}]}', "row 1 (the first row is 0)"),
    ],
)
def test_a_wrong_request_gets_one_line_that_says_what_is_wrong(plain: Run, body: bytes, said: str) -> None:
    with served(Predictor(plain)) as port:
        status, content = ask(port, "/predict", body)
        assert status == 422
        assert said in json.loads(content)["error"]
        assert ask(port, "/health")[0] == 200


def test_a_damaged_arrow_stream_is_refused_whatever_polars_makes_of_it() -> None:
    stream = pl.DataFrame({"patient": ["a"], "x": [[1.0, 2.0, 3.0]]}).write_ipc_stream(None).getvalue()
    for position in range(len(stream)):
        damaged = bytearray(stream)
        damaged[position] = 255
        with contextlib.suppress(DataError):
            read_rows(bytes(damaged), ARROW)


@pytest.mark.parametrize("wrong", [[1.0, 2.0], 1.0, [[1.0, 2.0, 3.0]]])
def test_an_input_of_another_shape_is_refused_and_changes_no_state(causal: Run, wrong: object) -> None:
    predictor = Predictor(causal)
    with pytest.raises(DataError, match="'x' needs 3 numbers"):
        predictor.predict(pl.DataFrame([{"patient": "a", "time": 0.0, "x": wrong}]))
    assert predictor.patients == 0


def test_context_that_the_server_makes_is_no_input(causal: Run) -> None:
    with served(Predictor(causal)) as port:
        assert json.loads(ask(port, "/model")[1])["inputs"] == ["x"]
    with pytest.raises(DataError, match=f"'{COLUMN}' is no input of the model; its inputs are x"):
        Predictor(causal).predict(pl.DataFrame([{**samples(0, 1)[0], COLUMN: [0.0]}]))


def test_a_time_of_any_whole_number_is_a_time(causal: Run) -> None:
    rows = read_rows(json.dumps({"samples": [{**samples(0, 1)[0], "time": 10**25}]}).encode(), "")
    assert len(Predictor(causal).predict(rows)) == 1


def test_a_model_of_earlier_samples_needs_their_time(causal: Run) -> None:
    with pytest.raises(DataError, match="add the column 'time'"):
        Predictor(causal).predict(pl.DataFrame([{"patient": "a", "x": [0.0, 0.0, 0.0]}]))


def test_times_within_sessions_are_refused_and_times_over_all_of_them_predict_as_the_command(tmp_path: Path) -> None:
    x, labels, patients, hours = _patients()
    frame = pl.DataFrame({"who": patients, "stay": hours // 5, "hour": hours % 5, "label": labels, "x": x[:, 0]})
    frame.write_csv(tmp_path / "table.csv")
    roles = {"patient": "who", "target": "label", "features": ["x"], "time": "hour", "session": "stay"}
    data = manydg.open_dataset(prepare("table", tmp_path / "table.csv", tmp_path / "data", **roles))
    manydg.train(data, algorithm="boosting", settings={"rounds": 5}, out=tmp_path / "run", context="causal")
    predict_raw(tmp_path / "run", tmp_path / "table.csv", tmp_path / "out")
    expected = pl.read_csv(tmp_path / "out" / "predictions.csv", infer_schema_length=None)["p_yes"].to_numpy()
    rows, model = frame.drop("label"), open_run(tmp_path / "run")
    with pytest.raises(DataError, match="add the column 'time'"):
        Predictor(model).predict(rows)
    over_all = rows.with_columns(time=torch.as_tensor(data.times).numpy())
    with pytest.raises(DataError, match="leave out 'stay', within which times were counted"):
        Predictor(model).predict(over_all)
    found = Predictor(model).predict(over_all.drop("stay"))["p_yes"].to_numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_metrics_count_requests_samples_and_patients(causal: Run) -> None:
    with served(Predictor(causal)) as port:
        ask(port, "/predict", json.dumps({"samples": samples(0, 3)}).encode())
        ask(port, "/predict", b"{")
        text = ask(port, "/metrics")[1].decode()
    assert 'manydg_requests_total{status="200"} 1' in text
    assert 'manydg_requests_total{status="422"} 1' in text
    assert "manydg_samples_total 3" in text
    assert "manydg_patients_in_memory 1" in text
    assert 'manydg_request_seconds_bucket{le="+Inf"} 2' in text


def test_a_table_is_asked_for_by_its_own_columns(tmp_path: Path) -> None:
    x, labels, patients, _ = _patients()
    frame = pl.DataFrame({"who": patients, "age": x[:, 0], "sex": np.where(x[:, 1] > 0, "f", "m"), "ill": labels})
    data = manydg.from_arrays(frame, "ill", "who")
    manydg.train(data, algorithm="base", epochs=1, out=tmp_path / "run", device="cpu")
    predictor = Predictor(open_run(tmp_path / "run"))
    table = predictor.predict(
        pl.DataFrame([{"patient": "n", "age": 0.3, "sex": "f"}, {"patient": "n", "age": 1.0, "sex": "m"}])
    )
    assert table["p_yes"].is_between(0, 1).all()
    with pytest.raises(DataError, match="lacks 1 features"):
        predictor.predict(pl.DataFrame([{"patient": "n", "age": 0.3}]))
    with pytest.raises(DataError, match=r"'sex' has type List\(String\); categories are text or numbers"):
        predictor.predict(pl.DataFrame([{"patient": "n", "age": 0.3, "sex": ["f"]}]))
