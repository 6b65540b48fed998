"""Routes of Tinker's HTTP protocol, so that scripts for the official SDK run on this machine.

Operations that take time return a request id at once, whose result the SDK fetches later. The
server is for one user: without a key of its own it accepts any, and listens to this machine only.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from google.protobuf.message import DecodeError
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from tinker import types
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

from agentrl.capacity import available_cores, trainer_threads
from agentrl.tinker_server.bodies import BODIES, read_json
from agentrl.tinker_server.protobuf import PROTOBUF
from agentrl.tinker_server.request_store import Answer, Json
from agentrl.tinker_server.server import TinkerServer
from agentrl_proxy.errors import ApiError
from agentrl_proxy.server.hosts import HostCheck
from agentrl_trainer.client import ServiceClient

_Respond = Callable[[Json], Any]
_POLL_SECONDS = 20.0  # the SDK gives up on a poll after 45


def create_app(
    folder: Path,
    models: list[str],
    *,
    api_key: str | None = None,
    host: str = "127.0.0.1",
    allowed_hosts: Sequence[str] = (),
) -> FastAPI:
    """Make the server.

    Args:
        folder: where states and sampler weights are saved.
        models: base models that the server reports; others can be used as well.
        api_key: what clients must send as X-API-Key; None: any key.
        host: the address that it will listen on.
        allowed_hosts: further names by which clients address it.
    """
    threads = partial(trainer_threads, available_cores(), alone=True)
    server = TinkerServer(ServiceClient(folder=folder, threads=threads))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(server.close)

    app = FastAPI(title="agentrl", openapi_url=None, lifespan=lifespan)
    app.state.server = server
    app.include_router(
        _routes(server, models), prefix="/api/v1", dependencies=[Depends(_key_check(api_key))]
    )
    app.add_middleware(HostCheck, host, allowed_hosts)

    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, ApiError) else 422
        said = str(error).encode("utf-8", "replace").decode()  # a lone surrogate is no UTF-8
        return JSONResponse({"detail": said}, status)

    for kind in (ValueError, DecodeError, ApiError):
        app.add_exception_handler(kind, refuse)
    return app


def _key_check(api_key: str | None) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        sent = request.headers.get("x-api-key", "").encode()
        if api_key is not None and not hmac.compare_digest(sent, api_key.encode()):
            raise HTTPException(
                401, "send this server's key as X-API-Key: set TINKER_API_KEY to it"
            )

    return check


def _routes(server: TinkerServer, models: list[str]) -> APIRouter:
    routes = APIRouter()
    submit = server.submit

    def json_post(path: str, kind: type[BaseModel]) -> Callable[[_Respond], _Respond]:
        """Route JSON bodies of the SDK's ``kind``."""

        def register(respond: _Respond) -> _Respond:
            @routes.post(path, response_model=None)
            async def answer(http: Request) -> Response | Json:
                body = read_json(kind, await BODIES.read(http.receive, http.headers))
                if iscoroutinefunction(respond):
                    return await respond(body)
                return await run_in_threadpool(respond, body)

            return respond

        return register

    def constant(method: str, path: str, answer: Json) -> None:
        @routes.api_route(path, methods=[method])
        async def respond() -> Json:
            return answer

    listed = [{"model_name": name, "trainable": True} for name in models]
    constant("GET", "/healthz", {"status": "ok"})
    constant("GET", "/get_server_capabilities", {"supported_models": listed})
    # The parts of a batch are done in the order of their arrival, so the SDK sends one by one.
    own = {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False}
    constant("POST", "/client/config", own)
    constant("POST", "/client/dynamic_config", {})
    constant("POST", "/telemetry", {"status": "accepted"})  # and dropped

    @routes.post("/create_session")
    async def create_session() -> Json:
        session = f"s{secrets.token_hex(4)}"
        server.renew(session)
        return {"type": "create_session", "session_id": session}

    @json_post("/session_heartbeat", types.SessionHeartbeatRequest)
    def heartbeat(body: Json) -> Json:
        server.finish_silent()
        session = body["session_id"]
        if session not in server.heard:
            raise HTTPException(410, f"there is no session {session!r}, or no longer")
        server.renew(session)
        return {"type": "session_heartbeat"}

    @routes.post("/sessions/{session}/finish")
    def finish(session: str) -> Json:
        server.finish(session)
        return {"session_id": session}

    @json_post("/get_info", types.GetInfoRequest)
    async def get_info(body: Json) -> Json:
        return server.info(body)

    @routes.post("/forward_backward")
    async def forward_backward(http: Request) -> Json:
        request = ForwardBackwardRequest.FromString(await BODIES.read(http.receive, http.headers))
        work = partial(server.forward_backward, request)
        made = await run_in_threadpool(submit, request.model_id, request.seq_id or None, work)
        return made | {"model_id": request.model_id}

    def operation(path: str, kind: type[BaseModel], work: Callable[[Json], Future[Answer]]) -> None:
        """Route to work of a model, or to work that makes a model, which the SDK numbers apart."""

        @json_post(path, kind)
        def start(body: Json) -> Json:
            if model_id := body.get("model_id"):
                return submit(model_id, body.get("seq_id"), lambda: work(body))
            return submit(f"{body['session_id']}:create", body["model_seq_id"], lambda: work(body))

    operation("/create_model", types.CreateModelRequest, server.create_model)
    operation("/load_weights", types.LoadWeightsRequest, server.load_weights)
    operation("/optim_step", types.OptimStepRequest, server.optim_step)
    operation("/save_weights", types.SaveWeightsRequest, server.save_weights)
    operation(
        "/save_weights_for_sampler",
        types.SaveWeightsForSamplerRequest,
        server.save_weights_for_sampler,
    )

    @json_post("/create_sampling_session", types.CreateSamplingSessionRequest)
    def create_sampling_session(body: Json) -> Json:
        server.renew(body["session_id"])
        try:
            return server.create_sampler(body)
        except Exception as error:  # also of the server: the SDK repeats a request that got 500
            raise HTTPException(422, f"{type(error).__name__}: {error}") from error

    @routes.get("/samplers/{sampler}")
    async def get_sampler(sampler: str) -> Json:
        client, path = server.sampler(sampler)
        base = client.get_base_model()
        return {"sampler_id": sampler, "base_model": base, "model_path": path}

    @json_post("/asample", types.SampleRequest)
    def sample(body: Json) -> Json:
        owner = body["sampling_session_id"]
        made = submit(owner, body.get("seq_id"), lambda: server.sample(body))
        count = body.get("num_samples", 1)
        return made | {"sample_sequence_ids": [f"{made['request_id']}:{i}" for i in range(count)]}

    @json_post("/retrieve_future", types.FutureRetrieveRequest)
    async def retrieve_future(body: Json) -> Response | Json:
        request_id = body["request_id"]
        try:
            answer = await server.requests.answer(request_id, _POLL_SECONDS)
        except TimeoutError:
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return Response(answer, media_type=PROTOBUF) if isinstance(answer, bytes) else answer

    return routes
