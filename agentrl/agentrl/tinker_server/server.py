"""What the server does for the SDK's requests: sessions, models, samplers and saved weights by id,
over the local client API. ``app`` has the routes."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from fastapi import HTTPException
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

from agentrl.tinker_server import protobuf
from agentrl.tinker_server.request_store import Answer, Json, RequestStore
from agentrl_trainer.client import (
    AdamParams,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from agentrl_trainer.client.futures import map_future
from agentrl_trainer.client.parameters import TINKER_ONLY
from agentrl_trainer.client.training import SAMPLERS, STATES
from agentrl_trainer.models.sources import resolve_model
from agentrl_trainer.names import check_name

log = logging.getLogger(__name__)

_LEASE_S = 300.0
_KEPT = 64  # samplers
_SCHEME = "tinker://"
_LORA_OPTIONS = ("rank", "seed", "train_mlp", "train_attn")  # not train_unembed, True by default
_SAMPLING_PARAMS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
_SAMPLE_OPTIONS = ("topk_sample_logprobs", *TINKER_ONLY["sample"])


@dataclass
class TinkerServer:
    """The sessions, and what they hold.

    A session ends after ``_LEASE_S`` of silence, at the next heartbeat of another; the SDK sends
    one every ten seconds. It does not tell when it drops a sampler, so the ``_KEPT`` most recently
    used ones stay.
    """

    service: ServiceClient
    heard: dict[str, float] = field(default_factory=dict[str, float])
    """When each session was last heard; monotonic, so that a suspended machine ends none."""
    models: dict[str, TrainingClient] = field(default_factory=dict[str, TrainingClient])
    samplers: OrderedDict[str, tuple[SamplingClient, str | None]] = field(
        default_factory=OrderedDict[str, tuple[SamplingClient, str | None]]
    )
    """Clients with the path of their saved weights, least recently used first."""
    requests: RequestStore = field(default_factory=RequestStore)

    def __post_init__(self) -> None:
        # Loading a base model may take longer than the SDK waits for a response.
        self._loading = ThreadPoolExecutor(4, thread_name_prefix="agentrl-tinker-load")

    def submit(self, owner: str, sequence: int | None, work: Callable[[], Future[Answer]]) -> Json:
        """Start ``work`` for ``owner``; return the id by which the SDK fetches the result."""
        self.renew(session_of(owner))
        return {"request_id": self.requests.submit(owner, sequence, work)}

    # ---- sessions

    def renew(self, session: str) -> None:
        """Note a request of a session. A session that is unknown begins, or begins again."""
        self.heard[session] = time.monotonic()

    def finish(self, session: str) -> None:
        """End a session: drop its models, adapters included, its samplers and its results."""
        self.heard.pop(session, None)
        for model_id in [key for key in [*self.models] if session_of(key) == session]:
            model = self.models.pop(model_id, None)
            if model is not None:  # else another thread has dropped it
                model.close()
        for sampler in [key for key in [*self.samplers] if session_of(key) == session]:
            self.samplers.pop(sampler, None)
        self.requests.release(f"{session}:")

    def finish_silent(self) -> None:
        """End the sessions that have been silent for too long."""
        now = time.monotonic()
        for session, heard in [*self.heard.items()]:
            if now - heard > _LEASE_S:
                log.warning("session %s was silent for %.0f s and has ended", session, _LEASE_S)
                self.finish(session)

    def close(self) -> None:
        self._loading.shutdown()
        self.service.close()

    # ---- models

    def model(self, model_id: str) -> TrainingClient:
        if model_id not in self.models:
            raise HTTPException(404, f"there is no model {model_id!r} in this server's memory")
        return self.models[model_id]

    def create_model(self, body: Json) -> Future[Answer]:
        options = _given(body.get("lora_config") or {}, _LORA_OPTIONS)
        create = partial(self.service.create_lora_training_client, body["base_model"], **options)
        return self._create(create, body, {"type": "create_model"})

    def _create(
        self, make: Callable[..., TrainingClient], body: Json, answer: Json
    ) -> Future[Answer]:
        """Make and register a model; ValueError if its session ended meanwhile."""
        session = body["session_id"]
        model_id = f"{session}:train:{body['model_seq_id']}"

        def work() -> Answer:
            client = self.models[model_id] = make(name=_folder_name(model_id))
            if session not in self.heard:
                self.models.pop(model_id, None)
                client.close().result()
                raise ValueError(f"session {session!r} has ended")
            return answer | {"model_id": model_id}

        return self._loading.submit(work)

    def info(self, body: Json) -> Json:
        info = asdict(self.model(body["model_id"]).get_info())
        info["model_data"]["tokenizer_id"] = resolve_model(info["model_name"])
        return info | {"model_id": body["model_id"]}

    def forward_backward(self, request: ForwardBackwardRequest) -> Future[Answer]:
        client = self.model(request.model_id)
        run = client.forward if request.forward_only else client.forward_backward
        config = {name: one.text or one.number for name, one in request.loss_fn_config_v2.items()}
        try:
            done = run(protobuf.datums(request), request.loss_fn, config)
        except Exception as error:
            if not request.forward_only:  # the SDK sends a large batch in parts
                client.spoil_step(error)
            raise
        return map_future(done.future(), protobuf.forward_backward_output)

    def optim_step(self, body: Json) -> Future[Answer]:
        if "adam_params" not in body:
            raise ValueError("optim_step: only AdamParams are known here")
        stepped = self.model(body["model_id"]).optim_step(AdamParams(**body["adam_params"]))
        return map_future(stepped.future(), lambda done: {"metrics": done.metrics})

    # ---- saved weights

    def save_weights(self, body: Json) -> Future[Answer]:
        name, model_id = body["path"], body["model_id"]
        saved = self.model(model_id).save_state(name, overwrite=body.get("overwrite", False))
        answer = {"path": f"{_SCHEME}{model_id}/{STATES}/{name}", "type": "save_weights"}
        return map_future(saved.future(), lambda _: answer)

    def save_weights_for_sampler(self, body: Json) -> Future[Answer]:
        model_id = body["model_id"]
        if name := body.get("path"):
            saved = self.model(model_id).save_weights_for_sampler(name)
            path = f"{_SCHEME}{model_id}/{SAMPLERS}/{name}"
            return map_future(saved.future(), lambda _: {"path": path})
        client = self.model(model_id).save_weights_and_get_sampling_client(kind=body.get("kind"))
        added = self.add_sampler(session_of(model_id), body["sampling_session_seq_id"], client)
        return map_future(client.ready, lambda _: added)

    def load_weights(self, body: Json) -> Future[Answer]:
        model_id, path, optimizer = body.get("model_id"), body["path"], body["optimizer"]
        if model_id:
            client = self.model(model_id)
            load = client.load_state_with_optimizer if optimizer else client.load_state
            loaded = load(self.path(path)).future()
            return map_future(loaded, lambda _: {"model_id": model_id})
        make = self.service.create_training_client_from_state
        if optimizer:
            make = self.service.create_training_client_from_state_with_optimizer
        return self._create(partial(make, self.path(path)), body, {"path": path})

    def path(self, uri: str) -> Path:
        """Return the folder of ``tinker://model/kind/name``; ValueError for anything else."""
        parts = uri.removeprefix(_SCHEME).split("/")
        if not uri.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in (STATES, SAMPLERS):
            raise ValueError(f"path: {uri!r} is not {_SCHEME}<model>/{STATES}|{SAMPLERS}/<name>")
        model, kind, name = check_name(_folder_name(parts[0]), "path"), *parts[1:]
        found = self.service.folder.resolve() / model / kind / check_name(name, "path")
        if not found.is_dir():
            raise ValueError(f"path: there is nothing at {uri!r}")
        return found

    # ---- samplers

    def create_sampler(self, body: Json) -> Json:
        path, create = body.get("model_path") or None, self.service.create_sampling_client
        client = create(self.path(path)) if path else create(base_model=body.get("base_model"))
        session, number = body["session_id"], body["sampling_session_seq_id"]
        return {"type": "create_sampling_session"} | self.add_sampler(session, number, client, path)

    def add_sampler(
        self, session: str, number: int, client: SamplingClient, path: str | None = None
    ) -> Json:
        sampler = f"{session}:sample:{number}"
        self.samplers[sampler] = client, path
        while len(self.samplers) > _KEPT:
            self.samplers.popitem(last=False)
        return {"sampling_session_id": sampler}

    def sampler(self, sampler: str) -> tuple[SamplingClient, str | None]:
        try:
            self.samplers.move_to_end(sampler)
            return self.samplers[sampler]
        except KeyError as error:
            raise HTTPException(
                404,
                f"there is no sampler {sampler!r}: its session has ended, or {_KEPT} others "
                "have been used since; create it again",
            ) from error

    def sample(self, body: Json) -> Future[Answer]:
        client, _ = self.sampler(body["sampling_session_id"])
        chunks = body["prompt"]["chunks"]
        if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
            raise ValueError("prompt: only tokens can be sampled from, no images or sound")
        sampled = client.sample(
            [token for chunk in chunks for token in chunk["tokens"]],
            body.get("num_samples", 1),
            SamplingParams(**_given(body["sampling_params"], _SAMPLING_PARAMS)),
            bool(body.get("prompt_logprobs")),
            **_given(body, _SAMPLE_OPTIONS),
        )
        return map_future(sampled.future(), protobuf.sample_response)


def _given(body: Json, names: tuple[str, ...]) -> Json:
    return {name: body[name] for name in names if name in body}


def session_of(owner: str) -> str:
    """Return the session of a model, a sampler or a request: ids start with it."""
    return owner.partition(":")[0]


def _folder_name(model_id: str) -> str:
    return model_id.replace(":", "-")
