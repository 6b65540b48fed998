"""What the server does for the SDK's requests: sessions, models, samplers and saved weights by id,
over the local client API. ``app`` has the routes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

from agentrl.tinker_server import messages
from agentrl.tinker_server.request_store import Answer, Json, RequestStore
from agentrl.tinker_server.samplers import Samplers
from agentrl.tinker_server.sessions import Sessions
from agentrl_trainer.client import AdamParams, SamplingParams, ServiceClient, TrainingClient
from agentrl_trainer.client.futures import map_future
from agentrl_trainer.client.saved import SAMPLERS, STATES
from agentrl_trainer.models.loading import resolve_model

log = logging.getLogger(__name__)

_SCHEME = "tinker://"


class TinkerServer:
    def __init__(self, service: ServiceClient, folder: Path, lease_seconds: float) -> None:
        self.service = service
        self.folder = folder
        self.sessions = Sessions(lease_seconds)
        self.models: dict[str, TrainingClient] = {}
        self.samplers = Samplers(
            lambda uri: service.create_sampling_client(model_path=self.path(uri))
        )
        self.requests = RequestStore()
        # Loading a base model may take longer than the SDK waits for a response.
        self.loading = ThreadPoolExecutor(4, thread_name_prefix="agentrl-tinker-load")

    def submit(self, owner: str, sequence: int | None, work: Callable[[], Future[Answer]]) -> Json:
        """Start ``work`` for ``owner``; return the id by which the SDK fetches the result."""
        self.sessions.renew(session_of(owner))
        return {"request_id": self.requests.submit(owner, sequence, work)}

    def finish(self, session: str) -> None:
        """End a session: drop its models, adapters included, its samplers and its results."""
        self.sessions.end(session)
        for model_id in [key for key in [*self.models] if key.startswith(f"{session}:")]:
            model = self.models.pop(model_id, None)
            if model is not None:  # else another thread has dropped it
                model.close()
        self.samplers.release(f"{session}:")
        self.requests.release(f"{session}:")

    def finish_silent(self) -> None:
        """End the sessions that have been silent for too long. Failures are logged."""
        for session in self.sessions.take_silent():
            log.warning(
                "session %s was silent for %.0f s and has ended", session, self.sessions.seconds
            )
            try:
                self.finish(session)
            except Exception:  # the other sessions must end all the same
                log.exception("session %s could not be ended cleanly", session)

    def close(self) -> None:
        self.loading.shutdown()
        self.service.close()

    def _keep(self, session: str, model_id: str, client: TrainingClient) -> None:
        """Register a model; ValueError if the session ended while the model was loaded."""
        self.models[model_id] = client
        if not self.sessions.alive(session):
            self.models.pop(model_id, None)
            client.close().result()
            raise ValueError(f"session {session!r} has ended")

    def model(self, model_id: str) -> TrainingClient:
        if model_id not in self.models:
            raise HTTPException(404, f"there is no model {model_id!r} in this server's memory")
        return self.models[model_id]

    def create_model(self, body: Json) -> Json:
        lora = body.get("lora_config") or {}
        model_id = _model_id(body)
        known = ("rank", "seed", "train_mlp", "train_attn")  # not train_unembed, True by default
        client = self.service.create_lora_training_client(
            body["base_model"],
            name=_folder_name(model_id),
            **{name: lora[name] for name in known if name in lora},
        )
        self._keep(body["session_id"], model_id, client)
        return {"model_id": model_id, "type": "create_model"}

    def info(self, body: Json) -> Json:
        info = self.model(body["model_id"]).get_info()
        data = {
            "arch": info.model_data.arch,
            "model_name": info.model_name,
            "tokenizer_id": resolve_model(info.model_name),
        }
        return {
            "model_id": body["model_id"],
            "model_data": data,
            "is_lora": True,
            "lora_rank": info.lora_rank,
            "model_name": info.model_name,
        }

    def forward_backward(self, request: ForwardBackwardRequest) -> Future[Answer]:
        client = self.model(request.model_id)
        run = client.forward if request.forward_only else client.forward_backward
        config = messages.loss_config(request)
        done = run(messages.datums(request), request.loss_fn, config)
        return map_future(done.future(), messages.forward_backward_output)

    def optim_step(self, body: Json) -> Future[Answer]:
        if "adam_params" not in body:
            raise ValueError("optim_step: only AdamParams are known here")
        stepped = self.model(body["model_id"]).optim_step(AdamParams(**body["adam_params"]))
        return map_future(stepped.future(), lambda done: {"metrics": done.metrics})

    def save_weights(self, body: Json) -> Future[Answer]:
        name, model_id = body["path"], body["model_id"]
        overwrite = body.get("overwrite", False)
        saved = self.model(model_id).save_state(name, overwrite=overwrite)
        path = f"{_SCHEME}{model_id}/{STATES}/{name}"
        return map_future(saved.future(), lambda _: {"path": path, "type": "save_weights"})

    def save_weights_for_sampler(self, body: Json) -> Future[Answer]:
        model_id = body["model_id"]
        if name := body.get("path"):
            saved = self.model(model_id).save_weights_for_sampler(name)
            path = f"{_SCHEME}{model_id}/{SAMPLERS}/{name}"
            return map_future(saved.future(), lambda _: {"path": path})
        client = self.model(model_id).save_weights_and_get_sampling_client(kind=body.get("kind"))
        sampler = f"{session_of(model_id)}:sample:{body['sampling_session_seq_id']}"
        self.samplers.add(sampler, client, None)
        return map_future(client.ready, lambda _: {"sampling_session_id": sampler})

    def load_weights(self, body: Json) -> Future[Answer]:
        model_id = body.get("model_id")
        if not model_id:
            return self.loading.submit(self._load_model, body)
        client = self.model(model_id)
        load = client.load_state_with_optimizer if body["optimizer"] else client.load_state
        loaded = load(self.path(body["path"])).future()
        return map_future(loaded, lambda _: {"model_id": model_id})

    def _load_model(self, body: Json) -> Json:
        model_id = _model_id(body)
        make = self.service.create_training_client_from_state_with_optimizer
        if not body["optimizer"]:
            make = self.service.create_training_client_from_state
        client = make(self.path(body["path"]), name=_folder_name(model_id))
        self._keep(body["session_id"], model_id, client)
        return {"path": body["path"], "model_id": model_id}

    def path(self, uri: str) -> Path:
        """Return the folder of ``tinker://model/kind/name``; ValueError for anything else."""
        parts = uri.removeprefix(_SCHEME).split("/")
        if not uri.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in (STATES, SAMPLERS):
            raise ValueError(f"path: {uri!r} is not {_SCHEME}<model>/{STATES}|{SAMPLERS}/<name>")
        found = (self.folder / _folder_name(parts[0]) / parts[1] / parts[2]).resolve()
        if self.folder.resolve() not in found.parents or not found.is_dir():
            raise ValueError(f"path: there is nothing at {uri!r}")
        return found

    def create_sampler(self, body: Json) -> Json:
        uri = body.get("model_path")
        sampler = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        if uri:
            client = self.service.create_sampling_client(model_path=self.path(uri))
        else:
            client = self.service.create_sampling_client(base_model=body.get("base_model"))
        self.samplers.add(sampler, client, uri or None, is_base=not uri)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def sample(self, body: Json) -> Future[Answer]:
        client = self.samplers.get(body["sampling_session_id"])
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
        return map_future(sampled.future(), messages.sample_response)


_SAMPLING_PARAMS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
_SAMPLE_OPTIONS = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
)


def _given(body: Json, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: body[name] for name in names if name in body}


def _model_id(body: Json) -> str:
    return f"{body['session_id']}:train:{body['model_seq_id']}"


def session_of(owner: str) -> str:
    """Return the session of a model, a sampler or a request: ids start with it."""
    return owner.partition(":")[0]


def _folder_name(model_id: str) -> str:
    return model_id.replace(":", "-")
