"""Routes of Tinker's HTTP protocol, so that scripts for the official SDK run on this machine.

Operations that take time return a request id at once, whose result the SDK fetches later. The
server is for one user on one machine: it accepts any key, so it should listen to this machine only.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

from agentrl.tinker_server.protobuf import PROTOBUF
from agentrl.tinker_server.request_store import Answer, Json
from agentrl.tinker_server.server import TinkerServer
from agentrl_trainer.client import ServiceClient

_POLL_SECONDS = 20.0  # the SDK gives up on a poll after 45


def create_app(folder: Path, models: list[str]) -> FastAPI:
    """Make the server.

    Args:
        folder: where states and sampler weights are saved.
        models: base models that the server reports; others can be used as well.
    """
    server = TinkerServer(ServiceClient(folder=folder))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(server.close)

    app = FastAPI(title="agentrl", openapi_url=None, lifespan=lifespan)
    app.state.server = server
    app.include_router(_routes(server, models), prefix="/api/v1")

    @app.exception_handler(ValueError)
    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 422)

    return app


def _routes(server: TinkerServer, models: list[str]) -> APIRouter:
    routes = APIRouter()
    submit = server.submit

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

    @routes.post("/session_heartbeat")
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

    @routes.post("/get_info")
    async def get_info(body: Json) -> Json:
        return server.info(body)

    @routes.post("/forward_backward")
    async def forward_backward(http: Request) -> Json:
        request = ForwardBackwardRequest.FromString(await http.body())
        work = partial(server.forward_backward, request)
        made = await run_in_threadpool(submit, request.model_id, request.seq_id or None, work)
        return made | {"model_id": request.model_id}

    def operation(path: str, work: Callable[[Json], Future[Answer]]) -> None:
        """Route to work of a model, or to work that makes a model, which the SDK numbers apart."""

        @routes.post(path)
        def start(body: Json) -> Json:
            if model_id := body.get("model_id"):
                return submit(model_id, body.get("seq_id"), lambda: work(body))
            return submit(f"{body['session_id']}:create", body["model_seq_id"], lambda: work(body))

    operation("/create_model", server.create_model)
    operation("/load_weights", server.load_weights)
    operation("/optim_step", server.optim_step)
    operation("/save_weights", server.save_weights)
    operation("/save_weights_for_sampler", server.save_weights_for_sampler)

    @routes.post("/create_sampling_session")
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

    @routes.post("/asample")
    def sample(body: Json) -> Json:
        owner = body["sampling_session_id"]
        made = submit(owner, body.get("seq_id"), lambda: server.sample(body))
        count = body.get("num_samples", 1)
        return made | {"sample_sequence_ids": [f"{made['request_id']}:{i}" for i in range(count)]}

    @routes.post("/retrieve_future", response_model=None)
    async def retrieve_future(body: Json) -> Response | Json:
        request_id = body["request_id"]
        try:
            answer = await server.requests.answer(request_id, _POLL_SECONDS)
        except TimeoutError:
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return Response(answer, media_type=PROTOBUF) if isinstance(answer, bytes) else answer

    return routes
