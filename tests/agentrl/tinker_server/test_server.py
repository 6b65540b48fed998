"""Tinker's protocol without the SDK: sessions, models, learning, saving, and what is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_data import ROW, TINY, supervised
from fastapi import HTTPException
from tinker import types
from tinker.proto import tinker_public_pb2 as proto
from tinker.proto.request_conv import forward_backward_request_to_proto

from agentrl.tinker_server import protobuf
from agentrl.tinker_server import server as server_module
from agentrl.tinker_server.server import TinkerServer
from agentrl_trainer.client import AdamParams, Datum, ForwardBackwardOutput, ServiceClient

ADAM = {"learning_rate": 1e-3}


class Client:
    """Requests to a server, and the results of those that take time."""

    def __init__(self, served: Any) -> None:
        self.server: TinkerServer = served.server
        self.http = httpx.Client(base_url=f"{served.url}/api/v1", timeout=60)

    def post(self, route: str, body: Any) -> httpx.Response:
        kind = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.http.post(route, **kind)

    def begin(self, route: str, body: Any) -> str:
        return self.post(route, body).json()["request_id"]

    def fetch(self, request_id: str) -> httpx.Response:
        return self.post("retrieve_future", {"request_id": request_id})

    def done(self, route: str, body: Any) -> Any:
        return self.fetch(self.begin(route, body)).json()

    def create(self, session: str, number: int = 0) -> str:
        return self.done("create_model", model(session, number))["model_id"]

    def save(self, model_id: str) -> str:
        return self.done("save_weights", {"model_id": model_id, "seq_id": 9, "path": "a"})["path"]

    @property
    def learner(self) -> Any:
        return self.server.service._base(TINY).learner


@pytest.fixture
def client(served: Any) -> Any:
    made = Client(served)
    yield made
    made.http.close()


def model(session: str, number: int, **more: Any) -> dict[str, Any]:
    lora = {"lora_config": {"rank": 4, "seed": 3, "train_unembed": True}}
    return {"session_id": session, "model_seq_id": number, "base_model": TINY} | lora | more


def request_of(model_id: str, sequence: int, datum: Datum) -> bytes:
    read = types.ModelInput.from_ints(datum.model_input.to_ints())
    data = [types.Datum(model_input=read, loss_fn_inputs={**datum.loss_fn_inputs})]
    batch = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(
        forward_backward_input=batch, model_id=model_id, seq_id=sequence
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def test_a_step_is_the_local_clients(client: Client, tmp_path: Path) -> None:
    session = client.post("create_session", {}).json()["session_id"]
    model_id = client.create(session)
    assert client.post("get_info", {"model_id": model_id}).json()["lora_rank"] == 4
    request = client.begin("forward_backward", request_of(model_id, 1, supervised()))
    again = client.begin("forward_backward", request_of(model_id, 1, supervised()))
    assert request == again  # a repetition is not learned from twice
    answer = client.fetch(request)
    assert answer.headers["content-type"] == protobuf.PROTOBUF
    output = proto.ForwardBackwardOutput.FromString(answer.content)
    adam = {"model_id": model_id, "seq_id": 2, "adam_params": ADAM}
    norm = client.done("optim_step", adam)["metrics"]["grad_norm"]
    with ServiceClient(folder=tmp_path / "local") as service:
        local = service.create_lora_training_client(TINY, rank=4, seed=3)
        here = local.forward_backward([supervised()]).result()
        assert output.metrics["loss:sum"] == here.metrics["loss:sum"]
        assert norm == local.optim_step(AdamParams(1e-3)).result().metrics["grad_norm"]


def test_a_batch_of_which_a_part_is_refused_is_not_stepped_on(client: Client) -> None:
    """The SDK sends a large batch in parts, and ``optim_step`` before it has their answers."""
    model_id = client.create(client.post("create_session", {}).json()["session_id"])
    bad = Datum(supervised().model_input, {"target_tokens": ROW[:-1]})
    adam = {"model_id": model_id, "adam_params": ADAM}
    client.fetch(client.begin("forward_backward", request_of(model_id, 1, supervised())))
    assert client.done("forward_backward", request_of(model_id, 2, bad))["category"] == "user"
    stepped = client.done("optim_step", adam | {"seq_id": 3})
    assert "nothing was updated: a forward_backward before this step failed" in stepped["error"]
    client.fetch(client.begin("forward_backward", request_of(model_id, 4, supervised())))
    assert client.done("optim_step", adam | {"seq_id": 5})["metrics"]["grad_norm"] > 0


def test_mistakes_are_named(client: Client) -> None:
    model_id = client.create("s1")
    bad = Datum(supervised().model_input, {"target_tokens": ROW[:-1]})
    failed = client.done("forward_backward", request_of(model_id, 3, bad))
    assert failed["category"] == "user"
    assert "shifted by one" in failed["error"]
    assert client.save(model_id) == f"tinker://{model_id}/weights/a"
    taken = client.done("save_weights", {"model_id": model_id, "seq_id": 5, "path": "a"})
    assert taken["category"] == "user"
    assert "take another name" in taken["error"]
    for path in ("../../weights", "../weights/a", f"{model_id}/weights/..", f"{model_id}/a/a"):
        outside = {"model_id": model_id, "path": f"tinker://{path}", "optimizer": True}
        assert client.done("load_weights", outside)["error"].startswith("ValueError: path: "), path
    for session in ("..", "a/b", "/a"):
        refused = client.post("create_model", model(session, 0))
        assert refused.status_code == 422
        assert "session_id: must be" in refused.text
    absent = client.post("optim_step", {"model_id": "s:train:9", "adam_params": ADAM})
    assert absent.status_code == 404
    assert client.fetch("none").status_code == 410


def test_a_repeated_creation_is_one_creation(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it still loads, which the SDK does not wait for."""
    made, may_continue = slow_creation(client, monkeypatch)
    with ThreadPoolExecutor(3) as several:
        requests = [*several.map(lambda _: client.begin("create_model", model("s1", 0)), range(3))]
    assert len(set(requests)) == 1
    assert not made
    may_continue.set()
    path = client.save(client.fetch(requests[0]).json()["model_id"])
    body = model("s1", 1, path=path, optimizer=True)
    again = [client.begin("load_weights", body) for _ in range(2)]
    assert again[0] == again[1]
    assert client.fetch(again[0]).json()["model_id"] == "s1:train:1"
    assert len(made) == 1
    assert set(client.server.models) == {"s1:train:0", "s1:train:1"}


def slow_creation(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], threading.Event]:
    """The models that were created, and what they wait for."""
    made: list[Any] = []
    may_continue = threading.Event()
    create = client.server.service.create_lora_training_client

    def slow(*args: Any, **options: Any) -> Any:
        may_continue.wait(30)
        made.append(create(*args, **options))
        return made[-1]

    monkeypatch.setattr(client.server.service, "create_lora_training_client", slow)
    return made, may_continue


def test_a_finished_session_leaves_nothing(client: Client) -> None:
    server = client.server
    assert protobuf.forward_backward_output(ForwardBackwardOutput([], {"a": 1.0}))  # no rows
    unnamed = {"model_id": client.create("s1"), "seq_id": 1, "sampling_session_seq_id": 0}
    client.done("save_weights_for_sampler", unnamed)
    body = {"session_id": "s1", "sampling_session_seq_id": 1, "base_model": TINY}
    based = client.post("create_sampling_session", body)
    assert based.json()["sampling_session_id"] == "s1:sample:1"
    wrong = body | {"sampling_session_seq_id": 2, "base_model": "./no-such-model"}
    refused = client.post("create_sampling_session", wrong)
    assert refused.status_code == 422
    assert "no-such-model" in refused.json()["detail"]
    assert client.http.get("samplers/s1:sample:0").json()["base_model"] == TINY
    assert server.requests._results
    client.post("sessions/s1/finish", {"reason": {"type": "success"}})
    assert not server.models
    assert not server.requests._results
    assert not server.samplers
    assert client.http.get("samplers/s1:sample:1").status_code == 404


def test_the_adapters_of_a_finished_session_go(client: Client) -> None:
    kept, gone = client.create("s1"), client.create("s2")
    for model_id in (kept, gone):
        client.fetch(client.begin("forward_backward", request_of(model_id, 1, supervised())))
    path = client.save(gone)
    client.post("sessions/s2/finish", {"reason": {"type": "success"}})
    adam = {"model_id": kept, "seq_id": 2, "adam_params": ADAM}
    # The gradients that the other session had accumulated are still there.
    assert client.done("optim_step", adam)["metrics"]["grad_norm"] > 0
    assert client.learner.adapters == ("s1-train-0",)
    assert set(client.learner.model.peft_config) == {"s1-train-0"}
    # What was saved stays.
    body = model("s3", 0, path=path, optimizer=True)
    assert client.done("load_weights", body)["model_id"] == "s3:train:0"
    assert client.learner.adapters == ("s1-train-0", "s3-train-0")


def test_silence_ends_a_session(client: Client) -> None:
    server = client.server
    loud, silent = (client.post("create_session", {}).json()["session_id"] for _ in range(2))
    kept, dropped = client.create(loud), client.create(silent)
    server.heard[silent] -= 1000  # as if its last request was long ago
    assert client.post("session_heartbeat", {"session_id": loud}).status_code == 200
    assert set(server.models) == {kept}
    assert all(request.startswith(loud) for request in server.requests._results)
    assert client.post("session_heartbeat", {"session_id": silent}).status_code == 410
    optim = {"model_id": dropped, "adam_params": {}}
    assert client.post("optim_step", optim).status_code == 404
    adapters = server.model(kept).local(lambda learner: learner.adapters).result()
    assert adapters == (f"{loud}-train-0",)


def test_a_model_that_comes_after_its_session_is_not_kept(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, may_continue = slow_creation(client, monkeypatch)
    pending = client.server.requests._results[client.begin("create_model", model("s1", 0))]
    client.post("sessions/s1/finish", {"reason": {"type": "interrupted"}})
    may_continue.set()
    answer = pending.result(30)
    assert isinstance(answer, dict)
    assert "session 's1' has ended" in answer["error"]
    assert not client.server.models
    client.server.service.create_lora_training_client(TINY, rank=4, name="s1-train-0")


def test_the_samplers_that_were_used_last_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_KEPT", 2)
    with ServiceClient(folder=tmp_path) as service:
        server = TinkerServer(service)
        training = service.create_lora_training_client(TINY, rank=4, name="s-train-0")
        training.save_weights_for_sampler("a").result()
        saved = {"session_id": "s", "model_path": "tinker://s:train:0/sampler_weights/a"}
        server.create_sampler(saved | {"sampling_session_seq_id": 0})
        server.add_sampler("s", 1, training.save_weights_and_get_sampling_client())
        assert len(server.sampler("s:sample:0")[0].compute_logprobs(ROW).result()) == len(ROW)
        server.add_sampler("s", 2, training.save_weights_and_get_sampling_client())
        assert [*server.samplers] == ["s:sample:0", "s:sample:2"]
        with pytest.raises(HTTPException, match="create it again"):
            server.sampler("s:sample:1")
