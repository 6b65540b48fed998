"""Tinker's HTTP protocol over the client API: scripts for the official SDK run on this machine.

Knows routes and names (sessions, models, samplers, futures, ``tinker://`` paths); what they do is
the local backend's. Everything that takes time answers with a future's id at once, which the SDK
then asks for. For one user on one machine: any key is accepted, so it listens to this machine only
unless told otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from agentrl.tinker_server import protobuf as wire
from agentrl.tinker_server.request_store import Answer, Json, Promises
from agentrl.tinker_server.samplers import Samplers
from agentrl.tinker_server.sessions import Leases
from agentrl_trainer.client import (
    AdamParams,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from agentrl_trainer.client.futures import map_future
from agentrl_trainer.client.naming import SAMPLERS, STATES
from agentrl_trainer.models.loading import resolve_model

log = logging.getLogger(__name__)

_POLL_SECONDS = 20.0  # the SDK gives up on a poll after 45
_SCHEME = "tinker://"


class TinkerServer:
    """What the SDK's clients hold on to, by id."""

    def __init__(self, service: ServiceClient, folder: Path, lease_seconds: float) -> None:
        self.service = service
        self.folder = folder
        self.leases = Leases(lease_seconds)
        self.models: dict[str, TrainingClient] = {}
        self.samplers = Samplers(
            lambda uri: service.create_sampling_client(model_path=self.path(uri))
        )
        self.promises = Promises()
        # Loading a base model may take longer than the SDK waits for a request's answer.
        self.loading = ThreadPoolExecutor(4, thread_name_prefix="agentrl-tinker-load")

    def finish(self, session: str) -> None:
        """Let go of what a session had, adapters included. What it asked for before is done."""
        self.leases.end(session)
        for model_id in [key for key in [*self.models] if key.startswith(f"{session}:")]:
            model = self.models.pop(model_id, None)
            if model is not None:  # else another thread let go of it
                model.close()
        self.samplers.release(f"{session}:")
        self.promises.release(f"{session}:")

    def finish_silent(self) -> None:
        """As ``finish``, of all that have been silent for too long; one may fail, and is logged."""
        for session in self.leases.take_silent():
            log.warning(
                "session %s was silent for %.0f s and has ended", session, self.leases.seconds
            )
            try:
                self.finish(session)
            except Exception:  # the next ones are over as well, and nobody else ends them
                log.exception("session %s could not be ended cleanly", session)

    def keep(self, session: str, model_id: str, client: TrainingClient) -> None:
        """Raises ValueError where the session has ended while the model was loaded."""
        self.models[model_id] = client
        if not self.leases.alive(session):
            self.models.pop(model_id, None)
            client.close().result()
            raise ValueError(f"session {session!r} has ended")

    def close(self) -> None:
        self.loading.shutdown()
        self.service.close()

    # ---- training

    def create_model(self, asked: Json) -> Json:
        lora = asked.get("lora_config") or {}
        model_id = f"{asked['session_id']}:train:{asked['model_seq_id']}"
        client = self.service.create_lora_training_client(
            asked["base_model"],
            rank=lora.get("rank", 32),
            seed=lora.get("seed"),
            train_mlp=lora.get("train_mlp", True),
            train_attn=lora.get("train_attn", True),
            name=_folder_name(model_id),  # train_unembed, the SDK's default, is left out
        )
        self.keep(asked["session_id"], model_id, client)
        return {"model_id": model_id, "type": "create_model"}

    def model(self, model_id: str) -> TrainingClient:
        if model_id not in self.models:
            raise HTTPException(404, f"there is no model {model_id!r} in this server's memory")
        return self.models[model_id]

    def train(self, asked: wire.ForwardBackward) -> Future[Answer]:
        client = self.model(asked.model_id)
        data = asked.data()
        if asked.forward_only:
            future = client.forward(data, asked.loss_fn, asked.config).future()
        else:
            future = client.forward_backward(data, asked.loss_fn, asked.config).future()
        return map_future(future, wire.forward_backward_output)

    def optim_step(self, asked: Json) -> Future[Answer]:
        if "adam_params" not in asked:
            raise ValueError("optim_step: only AdamParams are known here")
        stepped = self.model(asked["model_id"]).optim_step(AdamParams(**asked["adam_params"]))
        return map_future(stepped.future(), lambda done: {"metrics": done.metrics})

    # ---- weights

    def save_state(self, asked: Json) -> Future[Answer]:
        name, model_id = asked["path"], asked["model_id"]
        saved = self.model(model_id).save_state(name, asked.get("overwrite", False))
        path = f"{_SCHEME}{model_id}/{STATES}/{name}"
        return map_future(saved.future(), lambda _: {"path": path, "type": "save_weights"})

    def save_for_sampler(self, asked: Json) -> Future[Answer]:
        model_id = asked["model_id"]
        if name := asked.get("path"):
            saved = self.model(model_id).save_weights_for_sampler(name)
            path = f"{_SCHEME}{model_id}/{SAMPLERS}/{name}"
            return map_future(saved.future(), lambda _: {"path": path})
        client = self.model(model_id).save_weights_and_get_sampling_client(
            kind=asked.get("kind") or "snapshot"
        )
        sampler = f"{_session(model_id)}:sample:{asked['sampling_session_seq_id']}"
        self.samplers.add(sampler, client, None)
        ready = client._backend.ready
        return map_future(ready, lambda _: {"sampling_session_id": sampler})

    def load(self, asked: Json) -> Future[Answer]:
        model_id = asked.get("model_id")
        if not model_id:
            return self.loading.submit(self.load_model, asked)
        client = self.model(model_id)
        load = client.load_state_with_optimizer if asked["optimizer"] else client.load_state
        loaded = load(str(self.path(asked["path"]))).future()
        return map_future(loaded, lambda _: {"model_id": model_id})

    def load_model(self, asked: Json) -> Json:
        path, optimizer = str(self.path(asked["path"])), bool(asked["optimizer"])
        model_id = f"{asked['session_id']}:train:{asked['model_seq_id']}"
        made = self.service.create_training_client_from_state_with_optimizer
        if not optimizer:
            made = self.service.create_training_client_from_state
        client = made(path, name=_folder_name(model_id))
        self.keep(asked["session_id"], model_id, client)
        return {"path": asked["path"], "model_id": model_id}

    def path(self, uri: str) -> Path:
        """Where ``tinker://model/kind/name`` is on disk; ValueError for anything else."""
        parts = uri.removeprefix(_SCHEME).split("/")
        if not uri.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in (STATES, SAMPLERS):
            raise ValueError(f"path: {uri!r} is not {_SCHEME}<model>/{STATES}|{SAMPLERS}/<name>")
        found = (self.folder / _folder_name(parts[0]) / parts[1] / parts[2]).resolve()
        if self.folder.resolve() not in found.parents or not found.is_dir():
            raise ValueError(f"path: there is nothing at {uri!r}")
        return found

    # ---- sampling

    def create_sampler(self, asked: Json) -> Json:
        uri = asked.get("model_path")
        sampler = f"{asked['session_id']}:sample:{asked['sampling_session_seq_id']}"
        if uri:
            client = self.service.create_sampling_client(model_path=self.path(uri))
            self.samplers.add(sampler, client, uri)
        else:
            client = self.service.create_sampling_client(base_model=asked.get("base_model"))
            self.samplers.add_base(sampler, client)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def sample(self, asked: Json) -> Future[Answer]:
        client = self.samplers.get(asked["sampling_session_id"])
        chunks = asked["prompt"]["chunks"]
        if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
            raise ValueError("prompt: only tokens can be sampled from, no images or sound")
        sampled = client.sample(
            [token for chunk in chunks for token in chunk["tokens"]],
            asked.get("num_samples", 1),
            _sampling_params(asked["sampling_params"]),
            bool(asked.get("prompt_logprobs")),
            asked.get("topk_prompt_logprobs", 0),
            asked.get("topk_sample_logprobs", 0),
            asked.get("target_prompt_logprobs"),
            asked.get("prompt_alt_tokens_k", 0),
            asked.get("prompt_logprobs_last_n"),
        )
        return map_future(sampled.future(), wire.sample_response)


def create_app(
    folder: Path, models: list[str], *, lease_seconds: float = 300.0, **options: Any
) -> FastAPI:
    """The server. ``folder`` holds what is saved; ``models`` are those it says it has, though any
    causal language model may be asked for. A session ends that is silent for ``lease_seconds``.
    ``options`` are ServiceClient's."""
    server = TinkerServer(ServiceClient(folder=folder, **options), folder, lease_seconds)

    async def watch() -> None:
        while True:
            await asyncio.sleep(min(lease_seconds / 4, 15.0))
            try:
                await run_in_threadpool(server.finish_silent)
            except Exception:  # or no session would ever end again
                log.exception("sessions that are silent could not be ended")

    @asynccontextmanager
    async def closing(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(watch())
        yield
        watching.cancel()
        await run_in_threadpool(server.close)

    app = FastAPI(title="agentrl", openapi_url=None, lifespan=closing)
    app.state.server = server

    @app.exception_handler(ValueError)
    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 422)

    async def promise(owner: str, sequence: int | None, work: Callable[[], Future[Answer]]) -> str:
        server.leases.renew(_session(owner))
        return await run_in_threadpool(server.promises.make, owner, sequence, work)

    async def promised(
        asked: Mapping[str, Any], owner: str, work: Callable[[Any], Future[Answer]]
    ) -> Json:
        request = await promise(str(asked.get(owner)), asked.get("seq_id"), lambda: work(asked))
        return {"request_id": request}

    @app.get("/api/v1/healthz")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> Json:
        return {"supported_models": [{"model_name": name, "trainable": True} for name in models]}

    @app.post("/api/v1/client/config")
    async def config() -> Json:
        # One part of a batch after the other: they are done in the order of their arrival.
        return {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False}

    @app.post("/api/v1/client/dynamic_config")
    async def dynamic_config() -> Json:
        return {}

    @app.post("/api/v1/create_session")
    async def create_session() -> Json:
        session = f"s{secrets.token_hex(4)}"
        server.leases.renew(session)
        return {"type": "create_session", "session_id": session}

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat(request: Request) -> Json:
        session = (await request.json())["session_id"]
        if not server.leases.alive(session):
            raise HTTPException(410, f"there is no session {session!r}, or no longer")
        server.leases.renew(session)
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/sessions/{session}/finish")
    async def finish(session: str) -> Json:
        await run_in_threadpool(server.finish, session)
        return {"session_id": session}

    @app.post("/api/v1/telemetry")
    async def telemetry() -> Json:
        return {"status": "accepted"}  # and forgotten

    @app.post("/api/v1/create_model")
    async def create_model(request: Request) -> Json:
        asked = await request.json()

        request_id = await promise(
            f"{asked['session_id']}:create",
            asked["model_seq_id"],
            lambda: server.loading.submit(server.create_model, asked),
        )
        return {"request_id": request_id}

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> Json:
        model_id = (await request.json())["model_id"]
        info = server.model(model_id).get_info()
        return {
            "model_id": model_id,
            "model_data": {
                "arch": info.model_data.arch,
                "model_name": info.model_name,
                "tokenizer_id": resolve_model(info.model_name),
            },
            "is_lora": True,
            "lora_rank": info.lora_rank,
            "model_name": info.model_name,
        }

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> Json:
        asked = wire.ForwardBackward(await request.body())
        request_id = await promise(
            asked.model_id, asked.seq_id or None, lambda: server.train(asked)
        )
        return {"request_id": request_id, "model_id": asked.model_id}

    @app.post("/api/v1/optim_step")
    async def optim_step(request: Request) -> Json:
        return await promised(await request.json(), "model_id", server.optim_step)

    @app.post("/api/v1/save_weights")
    async def save_weights(request: Request) -> Json:
        return await promised(await request.json(), "model_id", server.save_state)

    @app.post("/api/v1/save_weights_for_sampler")
    async def save_weights_for_sampler(request: Request) -> Json:
        return await promised(await request.json(), "model_id", server.save_for_sampler)

    @app.post("/api/v1/load_weights")
    async def load_weights(request: Request) -> Json:
        asked = await request.json()
        if asked.get("model_id"):
            return await promised(asked, "model_id", server.load)
        # A new model, numbered among the session's as create_model's are.
        owner = f"{asked['session_id']}:create"
        return {
            "request_id": await promise(owner, asked["model_seq_id"], lambda: server.load(asked))
        }

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(request: Request) -> Json:
        asked = await request.json()
        request_id = await promise(
            f"{asked['session_id']}:sampler",
            asked["sampling_session_seq_id"],
            lambda: server.loading.submit(server.create_sampler, asked),
        )
        answer = await server.promises.answer(request_id)
        assert not isinstance(answer, bytes)
        if "error" in answer:
            # 422 whosever fault it is: the SDK repeats what it gets 500 for, to no avail.
            raise HTTPException(422, answer["error"])
        return answer

    @app.get("/api/v1/samplers/{sampler}")
    async def get_sampler(sampler: str) -> Json:
        base_model, uri = server.samplers.describe(sampler)
        return {"sampler_id": sampler, "base_model": base_model, "model_path": uri}

    @app.post("/api/v1/asample")
    async def sample(request: Request) -> Json:
        asked = await request.json()
        made = await promised(asked, "sampling_session_id", server.sample)
        count = asked.get("num_samples", 1)
        return made | {"sample_sequence_ids": [f"{made['request_id']}:{i}" for i in range(count)]}

    @app.post("/api/v1/retrieve_future", response_model=None)
    async def retrieve_future(request: Request) -> Response | Json:
        asked = (await request.json())["request_id"]
        if (owner := server.promises.owner(asked)) is not None:
            server.leases.renew(_session(owner))
        try:
            answer = await server.promises.answer(asked, _POLL_SECONDS)
        except TimeoutError:
            return {"type": "try_again", "request_id": asked, "queue_state": "active"}
        if isinstance(answer, bytes):
            return Response(answer, media_type=wire.PROTOBUF)
        return answer

    return app


def _sampling_params(asked: Json) -> SamplingParams:
    known = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
    return SamplingParams(**{name: asked[name] for name in known if name in asked})


def _session(owner: str) -> str:
    """Whose a model, a sampler or a request is: what every id begins with."""
    return owner.partition(":")[0]


def _folder_name(model_id: str) -> str:
    return model_id.replace(":", "-")
