"""Tinker's HTTP protocol over the client API: scripts for the official SDK run on this machine.

Knows routes and names (sessions, models, samplers, futures, ``tinker://`` paths); what they do is
the local backend's. Everything that takes time answers with a future's id at once, which the SDK
then asks for. For one user on one machine: any key is accepted, so it listens to this machine only
unless told otherwise.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from agentrl.tinker_server import wire
from agentrl_trainer.client import (
    AdamParams,
    SampleResponse,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from agentrl_trainer.client.futures import map_future
from agentrl_trainer.client.local import SAMPLERS, STATES
from agentrl_trainer.model import resolve_model

_POLL_SECONDS = 20.0  # the SDK gives up on a poll after 45
_FUTURES = 20_000
_SAMPLERS = 32
"""Unnamed samplers that are kept: the SDK does not tell when one is no longer needed."""
_SCHEME = "tinker://"

Json = dict[str, Any]
Answer = bytes | Json


class TinkerServer:
    """What the SDK's clients hold on to, by id."""

    def __init__(self, service: ServiceClient, folder: Path) -> None:
        self.service = service
        self.folder = folder
        self.models: dict[str, TrainingClient] = {}
        self.samplers: OrderedDict[str, tuple[SamplingClient, str | None]] = OrderedDict()
        self.futures: OrderedDict[str, Future[Answer]] = OrderedDict()
        self._asked: OrderedDict[tuple[str, int], str] = OrderedDict()

    # ---- futures

    def promise(self, owner: str, sequence: int | None, work: Callable[[], Future[Answer]]) -> str:
        """Begin ``work``, once: a request that the SDK repeats has the number of its first try."""
        key = (owner, sequence) if sequence is not None else None
        if key is not None and key in self._asked:
            return self._asked[key]
        try:
            future = work()
        except ValueError as error:
            future = Future()
            future.set_exception(error)
        request = secrets.token_hex(8)
        self.futures[request] = future
        if key is not None:
            self._asked[key] = request
        for known in (self.futures, self._asked):
            while len(known) > _FUTURES:
                known.popitem(last=False)
        return request

    async def retrieve(self, request: str) -> Response | Json:
        future = self.futures.get(request)
        if future is None:
            raise HTTPException(410, f"there is no request {request!r}")
        try:
            waiting = asyncio.shield(asyncio.wrap_future(future))
            answer = await asyncio.wait_for(waiting, _POLL_SECONDS)
        except TimeoutError:
            if not future.done():
                return {"type": "try_again", "request_id": request, "queue_state": "active"}
            answer = future.result()
        except Exception as error:
            category = "user" if isinstance(error, ValueError | FileExistsError) else "server"
            return {"error": f"{type(error).__name__}: {error}", "category": category}
        if isinstance(answer, bytes):
            return Response(answer, media_type=wire.PROTOBUF)
        return answer

    # ---- training

    def create_model(self, asked: Json) -> Json:
        lora = asked.get("lora_config") or {}
        model_id = f"{asked['session_id']}:train:{asked['model_seq_id']}"
        self.models[model_id] = self.service.create_lora_training_client(
            asked["base_model"],
            rank=lora.get("rank", 32),
            seed=lora.get("seed"),
            train_mlp=lora.get("train_mlp", True),
            train_attn=lora.get("train_attn", True),
            name=_folder_name(model_id),  # train_unembed, the SDK's default, is left out
        )
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
        client = self.model(model_id).save_weights_and_get_sampling_client()
        session = model_id.partition(":")[0]
        sampler = self.add_sampler(session, asked["sampling_session_seq_id"], client, None)
        ready = client._backend.ready
        return map_future(ready, lambda _: {"sampling_session_id": sampler})

    def load(self, asked: Json) -> Future[Answer]:
        path, optimizer = str(self.path(asked["path"])), bool(asked["optimizer"])
        if model_id := asked.get("model_id"):
            client = self.model(model_id)
            load = client.load_state_with_optimizer if optimizer else client.load_state
            return map_future(load(path).future(), lambda _: {"model_id": model_id})
        model_id = f"{asked['session_id']}:train:{asked['model_seq_id']}"
        made = self.service.create_training_client_from_state_with_optimizer
        if not optimizer:
            made = self.service.create_training_client_from_state
        self.models[model_id] = made(path, name=_folder_name(model_id))
        done: Future[Answer] = Future()
        done.set_result({"path": asked["path"], "model_id": model_id})
        return done

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

    def create_sampler(self, asked: Json) -> str:
        uri = asked.get("model_path")
        client = self.service.create_sampling_client(
            model_path=self.path(uri) if uri else None,
            base_model=None if uri else asked.get("base_model"),
        )
        return self.add_sampler(asked["session_id"], asked["sampling_session_seq_id"], client, uri)

    def add_sampler(
        self, session: str, sequence: int, client: SamplingClient, uri: str | None
    ) -> str:
        sampler = f"{session}:sample:{sequence}"
        self.samplers[sampler] = (client, uri)
        unnamed = [key for key, (_, path) in self.samplers.items() if path is None]
        for key in unnamed[:-_SAMPLERS]:
            del self.samplers[key]
        return sampler

    def sampler(self, sampler: str) -> tuple[SamplingClient, str | None]:
        if sampler not in self.samplers:
            raise HTTPException(
                404, f"there is no sampler {sampler!r}: it may have been superseded"
            )
        return self.samplers[sampler]

    def sample(self, asked: Json) -> Future[Answer]:
        for name in ("topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if asked.get(name):
                raise ValueError(f"{name} is not known here")
        client, _ = self.sampler(asked["sampling_session_id"])
        chunks = asked["prompt"]["chunks"]
        if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
            raise ValueError("prompt: only tokens can be sampled from, no images or sound")
        last = asked.get("prompt_logprobs_last_n")
        sampled = client.sample(
            [token for chunk in chunks for token in chunk["tokens"]],
            asked.get("num_samples", 1),
            _sampling_params(asked["sampling_params"]),
            bool(asked.get("prompt_logprobs")),
            asked.get("topk_sample_logprobs", 0),
        )
        return map_future(sampled.future(), lambda done: wire.sample_response(_last(done, last)))


def create_app(folder: Path, models: list[str], **options: Any) -> FastAPI:
    """The server. ``folder`` holds what is saved; ``models`` are those it says it has, though any
    causal language model may be asked for. ``options`` are ServiceClient's."""
    app = FastAPI(title="agentrl", openapi_url=None)
    server = TinkerServer(ServiceClient(folder=folder, **options), folder)

    @app.exception_handler(ValueError)
    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 422)

    async def promised(
        asked: Mapping[str, Any], owner: str, work: Callable[[Any], Future[Answer]]
    ) -> Json:
        key = str(asked.get(owner))
        request = await run_in_threadpool(
            server.promise, key, asked.get("seq_id"), lambda: work(asked)
        )
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
        return {"type": "create_session", "session_id": f"s{secrets.token_hex(4)}"}

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat() -> Json:
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/sessions/{session}/finish")
    async def finish(session: str) -> Json:
        return {"session_id": session}

    @app.post("/api/v1/telemetry")
    async def telemetry() -> Json:
        return {"status": "accepted"}  # and forgotten

    @app.post("/api/v1/create_model")
    async def create_model(request: Request) -> Json:
        asked = await request.json()

        def work() -> Future[Answer]:
            done: Future[Answer] = Future()
            done.set_result(server.create_model(asked))
            return done

        owner = f"{asked['session_id']}:create"
        number = asked["model_seq_id"]
        return {"request_id": await run_in_threadpool(server.promise, owner, number, work)}

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
        promise = await run_in_threadpool(
            server.promise, asked.model_id, asked.seq_id, lambda: server.train(asked)
        )
        return {"request_id": promise, "model_id": asked.model_id}

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
        return await promised(await request.json(), "model_id", server.load)

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(request: Request) -> Json:
        sampler = await run_in_threadpool(server.create_sampler, await request.json())
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    @app.get("/api/v1/samplers/{sampler}")
    async def get_sampler(sampler: str) -> Json:
        client, uri = server.sampler(sampler)
        return {"sampler_id": sampler, "base_model": client.get_base_model(), "model_path": uri}

    @app.post("/api/v1/asample")
    async def sample(request: Request) -> Json:
        asked = await request.json()
        made = await promised(asked, "sampling_session_id", server.sample)
        count = asked.get("num_samples", 1)
        return made | {"sample_sequence_ids": [f"{made['request_id']}:{i}" for i in range(count)]}

    @app.post("/api/v1/retrieve_future", response_model=None)
    async def retrieve_future(request: Request) -> Response | Json:
        return await server.retrieve((await request.json())["request_id"])

    return app


def _sampling_params(asked: Json) -> SamplingParams:
    known = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
    return SamplingParams(**{name: asked[name] for name in known if name in asked})


def _last(response: SampleResponse, count: int | None) -> SampleResponse:
    """Only the log-probs of the prompt's last tokens, as asked for."""
    scores = response.prompt_logprobs
    if count is None or scores is None:
        return response
    return SampleResponse(response.sequences, [None] * (len(scores) - count) + scores[-count:])


def _folder_name(model_id: str) -> str:
    return model_id.replace(":", "-")
