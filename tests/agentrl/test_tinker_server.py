"""Tinker's official SDK against our server, and the client API's tinker backend over both.

The SDK is in the dev extra; AGENTRL_TEST_TINKER_PYTHON names another Python that has one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from peer import python_with
from tinker.proto import tinker_public_pb2 as proto

from agentrl.tinker_server import create_app, messages
from agentrl.tinker_server.operations import TinkerServer
from agentrl.tinker_server.request_store import Answer, RequestStore
from agentrl.tinker_server.samplers import Samplers
from agentrl.tinker_server.sessions import Sessions
from agentrl_trainer.checkpoint import save_checkpoint
from agentrl_trainer.client import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    ServiceClient,
)
from agentrl_trainer.client.local.training import read_state

PYTHON = python_with("tinker", "AGENTRL_TEST_TINKER_PYTHON")
needs_sdk = pytest.mark.skipif(
    PYTHON is None,
    reason="no tinker here, and AGENTRL_TEST_TINKER_PYTHON names no Python with it",
)
TINY = "agentrl-tiny"
ROW = [5, 9, 300, 41, 77, 12, 600, 3]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return create_app(tmp_path, [TINY])


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    config = uvicorn.Config(app, port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    (socket,) = server.servers[0].sockets
    yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def post(url: str, route: str, body: Any) -> Any:
    kind = {"content": body} if isinstance(body, bytes) else {"json": body}
    return httpx.post(f"{url}/api/v1/{route}", timeout=60, **kind)


def settled(url: str, promise: Any) -> httpx.Response:
    return post(url, "retrieve_future", {"request_id": promise.json()["request_id"]})


def request_of(model: str, sequence: int, datum: Datum, loss: str = "cross_entropy") -> bytes:
    message = proto.ForwardBackwardRequest(model_id=model, seq_id=sequence, loss_fn=loss)
    made = message.data.add()
    tokens = np.asarray(datum.model_input.to_ints(), dtype=np.int32).tobytes()
    made.model_input.add().encoded_text.tokens = tokens
    for name, values in datum.loss_fn_inputs.items():
        tensor = made.loss_fn_inputs[name]
        whole = name == "target_tokens"
        tensor.dense = np.asarray(values, dtype=np.int64 if whole else np.float32).tobytes()
        tensor.dtype = 2 if whole else 1
    return message.SerializeToString()


def test_the_protocol(url: str, tmp_path: Path) -> None:
    """Without the SDK: sessions, a model, learning, saving, and what is wrong."""
    session = post(url, "create_session", {}).json()["session_id"]
    lora = {"rank": 4, "seed": 3, "train_unembed": True}
    asked = {"session_id": session, "model_seq_id": 0, "base_model": TINY, "lora_config": lora}
    model = settled(url, post(url, "create_model", asked)).json()["model_id"]
    assert post(url, "get_info", {"model_id": model}).json()["lora_rank"] == 4

    datum = Datum(ModelInput.from_ints(ROW[:-1]), {"target_tokens": ROW[1:]})
    promise = post(url, "forward_backward", request_of(model, 1, datum))
    again = post(url, "forward_backward", request_of(model, 1, datum))
    assert promise.json() == again.json()  # a retry is not learned from twice
    answer = settled(url, promise)
    assert answer.headers["content-type"] == messages.PROTOBUF
    output = proto.ForwardBackwardOutput.FromString(answer.content)
    loss = output.metrics["loss:sum"]
    adam = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}
    norm = settled(url, post(url, "optim_step", adam)).json()["metrics"]["grad_norm"]
    with ServiceClient(folder=tmp_path / "local") as service:
        client = service.create_lora_training_client(TINY, rank=4, seed=3)
        here = client.forward_backward([datum]).result()
        assert loss == here.metrics["loss:sum"]
        assert norm == client.optim_step(AdamParams(1e-3)).result().metrics["grad_norm"]

    bad = Datum(datum.model_input, {"target_tokens": ROW[:-1]})
    failed = settled(url, post(url, "forward_backward", request_of(model, 3, bad))).json()
    assert failed["category"] == "user"
    assert "shifted by one" in failed["error"]
    saved = {"model_id": model, "seq_id": 4, "path": "one"}
    path = settled(url, post(url, "save_weights", saved)).json()["path"]
    assert path == f"tinker://{model}/weights/one"
    outside = {"model_id": model, "path": "tinker://../../weights", "optimizer": True}
    assert "path: " in settled(url, post(url, "load_weights", outside)).json()["error"]
    taken = settled(url, post(url, "save_weights", saved | {"seq_id": 5})).json()
    assert taken["category"] == "user"
    assert "take another name" in taken["error"]
    absent = post(url, "optim_step", adam | {"model_id": "s:train:9"})
    assert absent.status_code == 404
    assert post(url, "retrieve_future", {"request_id": "none"}).status_code == 410


def begun(session: str, number: int, **more: Any) -> dict[str, Any]:
    lora = {"rank": 4, "seed": 3}
    asked = {"session_id": session, "model_seq_id": number, "base_model": TINY}
    return {**asked, "lora_config": lora, **more}


def test_a_repeated_creation_is_one_creation(
    app: FastAPI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it still loads, which the SDK does not wait for."""
    server: TinkerServer = app.state.server
    made: list[Any] = []
    may_go_on = threading.Event()
    create = server.service.create_lora_training_client

    def slow(*args: Any, **options: Any) -> Any:
        may_go_on.wait(30)
        made.append(create(*args, **options))
        return made[-1]

    monkeypatch.setattr(server.service, "create_lora_training_client", slow)
    with ThreadPoolExecutor(3) as several:
        answers = list(several.map(lambda _: post(url, "create_model", begun("s1", 0)), range(3)))
    assert len({answer.json()["request_id"] for answer in answers}) == 1
    assert not made
    may_go_on.set()
    model = settled(url, answers[0]).json()["model_id"]
    saved = settled(url, post(url, "save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))
    asked = begun("s1", 1, path=saved.json()["path"], optimizer=True)
    answers = [post(url, "load_weights", asked) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert settled(url, answers[0]).json()["model_id"] == "s1:train:1"
    assert len(made) == 1
    assert set(server.models) == {"s1:train:0", "s1:train:1"}


def test_a_finished_session_leaves_nothing(app: FastAPI, url: str) -> None:
    server: TinkerServer = app.state.server
    model = settled(url, post(url, "create_model", begun("s1", 0))).json()["model_id"]
    unnamed = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    settled(url, post(url, "save_weights_for_sampler", unnamed))
    asked = {"session_id": "s1", "sampling_session_seq_id": 1, "base_model": TINY}
    based = post(url, "create_sampling_session", asked)
    assert based.json()["sampling_session_id"] == "s1:sample:1"
    wrong = asked | {"sampling_session_seq_id": 2, "base_model": "./no-such-model"}
    refused = post(url, "create_sampling_session", wrong)
    assert refused.status_code == 422
    assert "no-such-model" in refused.json()["detail"]
    assert httpx.get(f"{url}/api/v1/samplers/s1:sample:0").json()["base_model"] == TINY
    assert server.requests.kept > 0
    post(url, "sessions/s1/finish", {"reason": {"type": "success"}})
    assert not server.models
    assert server.requests.kept == 0
    assert not server.samplers.loaded
    assert httpx.get(f"{url}/api/v1/samplers/s1:sample:1").status_code == 404


def learner_of(server: TinkerServer) -> Any:
    backend: Any = server.service._backend
    return backend.base(TINY).learner


def test_the_adapters_of_a_finished_session_go(app: FastAPI, url: str) -> None:
    server: TinkerServer = app.state.server
    kept = settled(url, post(url, "create_model", begun("s1", 0))).json()["model_id"]
    gone = settled(url, post(url, "create_model", begun("s2", 0))).json()["model_id"]
    datum = Datum(ModelInput.from_ints(ROW[:-1]), {"target_tokens": ROW[1:]})
    for model in (kept, gone):
        settled(url, post(url, "forward_backward", request_of(model, 1, datum)))
    path = settled(url, post(url, "save_weights", {"model_id": gone, "seq_id": 2, "path": "a"}))
    post(url, "sessions/s2/finish", {"reason": {"type": "success"}})
    adam = {"model_id": kept, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}
    stepped = settled(url, post(url, "optim_step", adam)).json()["metrics"]
    assert stepped["grad_norm"] > 0  # what the other had gathered is still there
    assert learner_of(server).adapters == ("s1-train-0",)
    assert set(learner_of(server).model.peft_config) == {"s1-train-0"}
    # What was saved stays, for whoever knows its path.
    again = begun("s3", 0, path=path.json()["path"], optimizer=True)
    assert settled(url, post(url, "load_weights", again)).json()["model_id"] == "s3:train:0"
    assert learner_of(server).adapters == ("s1-train-0", "s3-train-0")


def test_a_load_that_failed_leaves_its_name(app: FastAPI, url: str) -> None:
    server: TinkerServer = app.state.server
    model = settled(url, post(url, "create_model", begun("s1", 0))).json()["model_id"]
    saved = settled(url, post(url, "save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))
    state = server.path(saved.json()["path"])
    found = read_state(str(state))
    meta = {**found.meta, "lora": {**found.meta["lora"], "rank": 8}}  # the weights are of rank 4
    save_checkpoint(state, 1, tensors=found.tensors, meta=meta, keep=1)
    asked = begun("s2", 0, path=saved.json()["path"], optimizer=False)
    failed = settled(url, post(url, "load_weights", asked)).json()
    assert "has shape" in failed["error"]
    assert set(learner_of(server).model.peft_config) == {"s1-train-0"}
    made = server.service.create_lora_training_client(TINY, rank=4, name="s2-train-0")
    assert made.model_id == "s2-train-0"


def test_silence_ends_a_session(tmp_path: Path) -> None:
    with TestClient(create_app(tmp_path, [TINY], lease_seconds=12.0)) as client:
        app: Any = client.app
        server: TinkerServer = app.state.server

        def say(route: str, body: Any) -> Any:
            return client.post(f"/api/v1/{route}", json=body)

        loud, silent = (say("create_session", {}).json()["session_id"] for _ in range(2))
        for session in (loud, silent):
            promise = say("create_model", begun(session, 0)).json()["request_id"]
            say("retrieve_future", {"request_id": promise})
        assert set(server.models) == {f"{loud}:train:0", f"{silent}:train:0"}
        with server.sessions._lock:  # as if its last word was long ago; the watch comes by in 3 s
            server.sessions._heard[silent] -= 100
        deadline = time.monotonic() + 30
        while f"{silent}:train:0" in server.models and time.monotonic() < deadline:
            assert say("session_heartbeat", {"session_id": loud}).status_code == 200
            time.sleep(0.1)
        assert set(server.models) == {f"{loud}:train:0"}
        assert server.requests.owner(promise) is None
        assert say("session_heartbeat", {"session_id": silent}).status_code == 410
        optim = {"model_id": f"{silent}:train:0", "adam_params": {}}
        assert say("optim_step", optim).status_code == 404
        info = client.post("/api/v1/get_info", json={"model_id": f"{loud}:train:0"})
        assert info.json()["lora_rank"] == 4
        assert server.model(f"{loud}:train:0").local(lambda learner: learner.adapters).result() == (
            f"{loud}-train-0",
        )


def test_a_session_that_cannot_be_ended_is_no_harm_to_others(
    app: FastAPI, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server: TinkerServer = app.state.server
    bad, good = (post(url, "create_session", {}).json()["session_id"] for _ in range(2))
    for index in (0, 1):
        settled(url, post(url, "create_model", begun(good, index)))
    close = server.models[f"{good}:train:0"].close

    def closed_by_two() -> Any:
        server.finish(good)
        return close()

    monkeypatch.setattr(server.models[f"{good}:train:0"], "close", closed_by_two)
    release = server.samplers.release

    def fails(prefix: str) -> None:
        if prefix == f"{bad}:":
            raise OSError("no space left")
        release(prefix)

    monkeypatch.setattr(server.samplers, "release", fails)
    for session in (bad, good):
        server.sessions._heard[session] -= 10_000
    server.finish_silent()
    assert not server.models
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage() for record in errors] == [
        f"session {bad} could not be ended cleanly"
    ]
    assert "no space left" in str(errors[0].exc_info)


def test_a_model_that_comes_after_its_session_is_not_kept(
    app: FastAPI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: TinkerServer = app.state.server
    create = server.service.create_lora_training_client
    may_go_on = threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        may_go_on.wait(30)
        return create(*args, **options)

    monkeypatch.setattr(server.service, "create_lora_training_client", slow)
    promise = post(url, "create_model", begun("s1", 0)).json()["request_id"]
    pending = server.requests._requests[promise].answer
    post(url, "sessions/s1/finish", {"reason": {"type": "interrupted"}})
    may_go_on.set()
    answer = pending.result(30)
    assert isinstance(answer, dict)
    assert "session 's1' has ended" in answer["error"]
    assert not server.models
    server.service.create_lora_training_client(TINY, rank=4, name="s1-train-0")


def test_leases_count_from_what_was_heard_last() -> None:
    now = 0.0
    leases = Sessions(10.0, lambda: now)
    leases.renew("a")
    leases.renew("b")
    now = 9.0
    leases.renew("b")
    now = 11.0
    assert leases.take_silent() == ["a"]
    assert (leases.alive("a"), leases.alive("b"), leases.take_silent()) == (False, True, [])
    leases.end("b")
    now = 99.0
    assert leases.take_silent() == []


def done(answer: Answer) -> Future[Answer]:
    future: Future[Answer] = Future()
    future.set_result(answer)
    return future


def test_a_repetition_waits_until_the_work_has_its_place() -> None:
    promises = RequestStore()
    entered, may_go_on = threading.Event(), threading.Event()
    runs: list[int] = []

    def work() -> Future[Answer]:
        entered.set()
        may_go_on.wait(30)
        runs.append(1)
        return done({"done": True})

    with ThreadPoolExecutor(2) as several:
        first = several.submit(promises.submit, "m", 1, work)
        entered.wait(30)
        second = several.submit(promises.submit, "m", 1, work)
        time.sleep(0.1)
        assert not second.done()
        may_go_on.set()
        assert first.result() == second.result()
    assert runs == [1]
    for _ in range(2):  # its delivery may have failed
        assert asyncio.run(promises.answer(first.result())) == {"done": True}


async def test_what_work_raises_is_its_result() -> None:
    promises = RequestStore()

    def raises(error: Exception) -> Any:
        def work() -> Future[Answer]:
            raise error

        return work

    for error, category in ((FileExistsError("a"), "user"), (OSError("disk"), "server")):
        answer = await promises.answer(promises.submit("m", None, raises(error)))
        assert answer == {"error": f"{type(error).__name__}: {error}", "category": category}
    with pytest.raises(HTTPException):
        promises.submit("m", 1, raises(HTTPException(404, "no model")))
    again = promises.submit("m", 1, lambda: done({"now": "there"}))
    assert await promises.answer(again) == {"now": "there"}


async def test_results_are_bounded_delivered_ones_go_first() -> None:
    promises = RequestStore(result_bytes=100)
    first, second = (promises.submit("m", i, lambda: done(b"x" * 40)) for i in range(2))
    assert len(await promises.answer(second)) == 40
    third = promises.submit("m", 2, lambda: done(b"x" * 40))
    with pytest.raises(HTTPException, match="no longer"):
        await promises.answer(second)
    assert len(await promises.answer(first)) == len(await promises.answer(third)) == 40
    assert promises.submit("m", 1, lambda: done(b"")) == second  # still not done a second time


def test_which_samplers_are_kept(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path) as service:
        training = service.create_lora_training_client(TINY, rank=4)
        path = training.save_weights_for_sampler("a").result().path
        loads: list[str] = []

        def load(uri: str) -> Any:
            loads.append(uri)
            return service.create_sampling_client(model_path=uri)

        samplers = Samplers(load, kept=2)
        samplers.add("s:base", service.create_sampling_client(base_model=TINY), None, is_base=True)
        for name in "abc":
            samplers.add(f"s:{name}", load(path), path)
        samplers.add("s:1", training.save_weights_and_get_sampling_client(), None)
        samplers.add("s:2", training.save_weights_and_get_sampling_client(), None)
        samplers.get("s:1")
        samplers.add("s:3", training.save_weights_and_get_sampling_client(), None)
        assert samplers.loaded == ["s:b", "s:c", "s:1", "s:3"]
        samplers.get("s:base")
        with pytest.raises(HTTPException, match="saved nowhere"):
            samplers.get("s:2")
        assert len(samplers.get("s:a").compute_logprobs(ROW).result()) == len(ROW)  # made again
        assert len(loads) == 4
        assert samplers.loaded == ["s:c", "s:1", "s:3", "s:a"]


def test_an_output_without_rows() -> None:
    assert messages.forward_backward_output(ForwardBackwardOutput([], {"a": 1.0}))


SDK = """
import json, sys, tinker
from tinker import types
url, row = sys.argv[1], json.loads(sys.argv[2])
service = tinker.ServiceClient(base_url=url, api_key="tml-test")
client = service.create_lora_training_client("agentrl-tiny", rank=4, seed=3).result()
datum = types.Datum(model_input=types.ModelInput.from_ints(row[:-1]),
                    loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)})
losses = []
for _ in range(3):
    done = client.forward_backward([datum, datum], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    losses.append(done.result().metrics["loss:sum"])
sampler = client.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=6, temperature=0.0)
response = sampler.sample(types.ModelInput.from_ints(row), 2, params).result()
scores = sampler.compute_logprobs(types.ModelInput.from_ints(row)).result()
state = client.save_state("s").result().path
again = service.create_training_client_from_state_with_optimizer(state).result()
forward = again.forward([datum], "cross_entropy").result()
custom = again.forward_backward_custom([datum], lambda d, lp: (-lp[0].sum(), {"mine": 2.0}))
print(json.dumps({
    "losses": losses,
    "tokens": [list(s.tokens) for s in response.sequences],
    "scores": scores,
    "forward": forward.loss_fn_outputs[0]["logprobs"].data,
    "custom": custom.result().metrics,
    "tokenizer": client.get_tokenizer().encode("I am 7."),
}))
"""


@pytest.mark.tinker
@needs_sdk
def test_the_official_sdk_learns_what_the_local_client_does(url: str, tmp_path: Path) -> None:
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, "-c", SDK, url, json.dumps(ROW)],
        capture_output=True,
        text=True,
        timeout=170,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    datum = Datum(ModelInput.from_ints(ROW[:-1]), {"target_tokens": ROW[1:]})
    with ServiceClient(folder=tmp_path / "local") as service:
        client = service.create_lora_training_client(TINY, rank=4, seed=3)
        losses = []
        for _ in range(3):
            losses.append(client.forward_backward([datum, datum]).result().metrics["loss:sum"])
            client.optim_step(AdamParams(learning_rate=1e-2)).result()
        assert found["losses"] == losses
        expected = client.forward([datum]).result().loss_fn_outputs[0]["logprobs"]
        assert found["forward"] == pytest.approx(expected.tolist(), abs=1e-6)
        assert found["scores"][1:] == pytest.approx(expected.tolist(), abs=1e-4)
        assert found["scores"][0] is None
        assert found["custom"]["mine"] == 2.0
        assert found["custom"]["loss:sum"] == pytest.approx(-expected.sum(), rel=1e-5)
        assert found["tokens"][0] == found["tokens"][1]
        assert found["tokenizer"] == client.get_tokenizer().encode("I am 7.")


HOSTED = """
import json, sys
from agentrl import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
url, row, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
found = []
for base_url in (None, url):
    key = {} if base_url is None else {"api_key": "tml-test"}
    with ServiceClient(base_url=base_url, folder=f"{folder}/{base_url is None}", **key) as service:
        client = service.create_lora_training_client("agentrl-tiny", rank=4, seed=3)
        datum = Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]})
        losses = []
        for _ in range(2):
            done = client.forward_backward([datum])
            client.optim_step(optim_params=AdamParams(learning_rate=1e-2)).result()
            losses.append(done.result().metrics["loss:sum"])
        sampler = client.save_weights_and_get_sampling_client(name="unused")
        params = SamplingParams(max_tokens=6, temperature=0.0)
        weights = client.save_weights_for_sampler("w", ttl_seconds=3600).result().path
        saved = client.create_sampling_client(weights)
        replies = sampler.sample_batch([row, row[:4]], 2, params).result()
        scores = sampler.compute_logprobs_batch([row, row[:3]]).result()
        custom = client.forward_backward_custom(
            [datum], lambda d, lp: (-lp[0].sum(), {}), loss_type_input="logprobs"
        )
        state = client.save_state("s", ttl_seconds=3600, user_metadata={"a": "b"}).result().path
        again = service.create_training_client_from_state_with_optimizer(state)
        client.log(step=1, loss=losses[-1])
        found.append({
            "losses": losses,
            "tokens": [s.tokens for r in replies for s in r.sequences],
            "scores": [[round(x, 4) for x in s[1:]] for s in scores],
            "custom": round(custom.result().metrics["loss:sum"], 3),
            "forward": again.forward([datum]).result().loss_fn_outputs[0]["logprobs"].tolist(),
            "model": client.get_info().model_name,
            "saved": saved.sample(row, 1, params).result().sequences[0].tokens,
            "models": service.supported_models(),
        })
print(json.dumps(found))
"""


@pytest.mark.tinker
@needs_sdk
def test_both_backends_give_the_same(url: str, tmp_path: Path) -> None:
    assert PYTHON is not None
    packages = next((Path(PYTHON).parent.parent / "lib").glob("python*/site-packages"))
    # Ours first, with its own versions; the SDK and what only it needs come from its environment.
    path = os.pathsep.join([*(p for p in sys.path if p), str(packages)])
    done = subprocess.run(
        [sys.executable, "-c", HOSTED, url, json.dumps(ROW), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    local, hosted = json.loads(done.stdout.splitlines()[-1])
    assert hosted == local
