"""A vLLM server, as the gateway's ``Sampler``: tokens in, tokens out.

Knows which adapter versions the server has, and whether it lives. Does not know what goes over the
wire (``agentrl.samplers.vllm.api`` does), does not start the server
(``agentrl.samplers.vllm.server`` does).

Three properties make the tokens trainable, and each is checked against the server, not assumed:

- *Raw log-probs.* vLLM's ``logprobs_mode`` must be ``raw_logprobs`` (its default): of the
  temperature-1 policy, before bias, top-k and top-p. ``start`` probes the server for it.
- *No stale adapter.* Each load gets a LoRA name that never was and never will be again. vLLM keys
  adapters by name and its prefix cache by (name, path), so neither can answer for an older one,
  even where a resumed run writes another adapter to the same path. A request says which load it
  wants and keeps it to its end; a load is dropped when it was replaced and nobody uses it. A
  server that lost them (it died and was started again) is given them anew before it is asked.
- *The prompt is the prompt.* vLLM returns the ids that it consumed; they must be those sent.

Under a grammar vLLM masks the logits first, so what it calls raw is the policy's renormalised over
what the mask left. The raw log-probs then come from a second request that scores the finished
answer, and the difference is the mask's mass. So a constrained answer arrives as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import httpx

from agentrl.samplers.vllm import api as vllm_api
from agentrl.samplers.vllm.api import VllmError
from agentrl.samplers.vllm.server import adapts_experts
from agentrl.timing import Waiting
from agentrl_proxy.sampler import (
    ContextLengthError,
    DecodingParams,
    GrammarError,
    RefusedError,
    SampleEvent,
    TokenEvent,
)

log = logging.getLogger("agentrl")

_POLL_START_S = 0.25
_POLL_S = 1.0
_SILENCE_S = 60.0  # a server that has not answered for so long is dead; a busy one is slower
_PATIENCE_S = 4.0  # of a publication, for a server that is down
_LOAD_S = 25.0  # for an adapter; with the patience less than what publishes waits
_CONNECT_S = 10.0
_LOOK_S = 10.0  # for what the watch asks
_KEEP_ALIVE_S = 2.0  # less than vLLM's 5: a connection that it is about to close must not be used
_NEVER = -math.inf
_LOST_ADAPTERS = "it has lost its adapters"
_IN_VAIN = 3  # restorations that change nothing, before we say so
_NOT_LISTED = (
    "it does not list what it loaded: several processes seem to answer at this URL, each with "
    "adapters of its own; start vLLM with --api-server-count 1, and one server per URL"
)
_TOKENS_PER_CHUNK = 8
"""A chunk costs both sides about as much as a token does to sample on a GPU. The first and last
ones come at once; of a cancelled answer up to one chunk's tokens are not recorded."""

_T = TypeVar("_T")
_Score: TypeAlias = tuple[float, list[tuple[int, float]] | None]


@dataclass(slots=True)
class _Load:
    """One adapter version as the server has it."""

    lora: str  # its name there
    version: int
    path: str
    experts: bool = False  # whether it adapts experts
    users: int = 0
    replaced: bool = False

    def request(self) -> dict[str, str | bool]:
        asked: dict[str, str | bool] = {"lora_name": self.lora, "lora_path": self.path}
        return asked | {"is_3d_lora_weight": True} if self.experts else asked


class VllmSampler:
    """Samples through a server that is up, or comes up.

    Args:
        url: the server's, without ``/v1``; ``unix:/path`` for a socket.
        api_key: what it was started with, if it wants one.
        eos_ids: tokens that end an answer.
        context_length: of the base model; the server may have been started with less.
        wait_s: how long ``start`` waits for a server that does not answer yet; None: as long as it
            takes, where others see to it that the server comes up.
    """

    def __init__(
        self,
        url: str,
        *,
        eos_ids: frozenset[int],
        context_length: int,
        api_key: str | None = None,
        wait_s: float | None = None,
    ) -> None:
        self.context_length = context_length
        self._url = url
        self._wait_s = wait_s
        self._eos_ids = sorted(eos_ids)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._base = ""  # the server's name of the base model
        self._enforces_grammars = False
        self._loads: dict[str, _Load] = {}
        self._there: set[str] = set()  # LoRA names that the server may have: unloaded in the end
        self._replacing = threading.Lock()  # the event loop and the watch both do
        self._swaps = 0
        self._recoveries = 0
        self._in_vain = 0  # restorations in a row that changed nothing
        self._in_flight = 0
        self._stats: dict[str, float] = {}
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # whose the client is
        self._lifetime: AsyncGenerator[httpx.AsyncClient] | None = None
        self._waits: set[asyncio.Timeout] = set()  # for the server; that loop's alone
        self._unloading: set[asyncio.Task[None]] = set()
        self._heard = _NEVER  # when the server last answered, unless it died since
        self._trouble = ""  # why it is not in use
        self._stopping = threading.Event()
        self._watch: threading.Thread | None = None

    # ---- life

    def start(self) -> None:
        """Waits for the server, and says so; checks that it is fit, begins to watch it.

        From then on the server may die and come back: ``healthy`` says which, and when it is true
        again the server has every adapter that was loaded.

        Raises:
            VllmError: it does not come up in time, or is not fit.
        """
        waiting = Waiting(log.warning, first_s=1.0)
        with self._blocking() as server:
            while why := vllm_api.why_not_up(server, _LOOK_S):
                said = f"no vLLM server is ready at {self._url}: {why}"
                if self._wait_s is not None and waiting.seconds >= self._wait_s:
                    raise VllmError(f"vllm_url: {said}; vllm_wait is {self._wait_s:g} s")
                waiting.still(lambda said=said: f"{said}; waiting{_up_to(self._wait_s)}")
                if self._stopping.wait(_POLL_START_S):
                    return
            self._learn(server)
        self._heard = time.monotonic()
        self._watch = threading.Thread(target=self._keep_watch, name="vllm-watch", daemon=True)
        self._watch.start()

    def stop(self) -> None:
        """Stops watching and takes its adapters out of the server, which goes on."""
        self._stopping.set()
        if self._watch is not None:
            self._watch.join(timeout=2.0)  # it may be waiting for a server that hangs
        self._heard = _NEVER
        with self._blocking() as server, contextlib.suppress(httpx.HTTPError):
            for lora in list(self._there):
                server.post("/v1/unload_lora_adapter", json={"lora_name": lora}, timeout=2.0)

    @property
    def healthy(self) -> bool:
        """Whether the server answers, with all adapters. False is not for good."""
        return time.monotonic() - self._heard < _SILENCE_S

    @property
    def adapters(self) -> Mapping[str, int]:
        return {name: load.version for name, load in self._loads.items()}

    def stats(self) -> dict[str, Any]:
        """The server's own counts, a second old at most, and ours."""
        ours = {"in_flight": self._in_flight, "swaps": self._swaps, "recoveries": self._recoveries}
        return {**self._stats, "sampler": "vllm", **ours}

    # ---- adapters

    def load_now(self, name: str, version: int, path: str) -> None:
        """``load_adapter`` for where no event loop runs yet."""
        load = _fresh_load(name, version, path)
        with self._blocking() as server:
            self._load_on(server, load)
        self._loads[name] = load
        self._swaps += 1

    async def load_adapter(self, name: str, version: int, path: str) -> None:
        """Loads it beside the one that answers now, then answers with it.

        Raises:
            RefusedError: the server does not take it (``invalid_parameter``), or there is none now
                (``stopped``).
        """
        await self._until_healthy()
        load = _fresh_load(name, version, path)
        self._there.add(load.lora)  # first: one that nobody waited for may be loaded all the same
        try:
            asked = load.request()
            answer = await self._post("/v1/load_lora_adapter", asked, limit_s=_LOAD_S)
            vllm_api.require_loaded(answer, path)
        except BaseException as error:
            self._begin_unload(load.lora)
            if isinstance(error, httpx.TransportError):
                raise _unanswered(error) from error
            raise
        with self._replacing:
            before = self._loads.get(name)
            self._loads[name] = load
        self._swaps += 1
        if before is not None:
            before.replaced = True
            self._drop_if_unused(before)

    async def _until_healthy(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self.healthy:
            if time.monotonic() > deadline:
                raise self._out_of_use()
            await asyncio.sleep(_POLL_START_S)

    def _out_of_use(self) -> RefusedError:
        return RefusedError("stopped", f"vLLM is out of use: {self._trouble or _silence()}")

    def _drop_if_unused(self, load: _Load) -> None:
        if load.replaced and not load.users:
            self._begin_unload(load.lora)

    def _begin_unload(self, lora: str) -> None:
        task = asyncio.get_running_loop().create_task(self._unload(lora))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _unload(self, lora: str) -> None:
        try:
            asked = {"lora_name": lora}
            answer = await self._post("/v1/unload_lora_adapter", asked, limit_s=_LOAD_S)
            if answer.status_code != 404:  # a server that died has lost it anyway
                answer.raise_for_status()
            self._there.discard(lora)
        except (httpx.HTTPError, RefusedError) as error:
            # It is never asked for again: no harm but its memory.
            log.warning("vLLM did not unload %s: %s", lora, error)

    # ---- sampling

    async def sample(
        self, prompt_ids: Sequence[int], params: DecodingParams, adapter: str | None
    ) -> AsyncGenerator[SampleEvent]:
        room = self.context_length - len(prompt_ids)
        if params.grammar is not None:
            if not self._enforces_grammars:
                raise GrammarError(vllm_api.NO_GRAMMARS)
            room -= 1  # for the token that scoring an answer has to sample
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens and the model's context is "
                f"{self.context_length}, answer included"
            )
        load = self._use(adapter)
        model = self._base if load is None else load.lora
        max_tokens = min(params.max_tokens, room)
        body = vllm_api.completion(model, prompt_ids, params, max_tokens, self._eos_ids)
        version = None if load is None else load.version
        events = (
            self._streamed(body, params, version)
            if params.grammar is None
            else self._constrained(body, params, version)
        )
        try:
            async for event in events:
                yield event
        except httpx.TransportError as error:
            raise _unanswered(error) from error
        finally:
            await events.aclose()
            self._used(load)

    async def _streamed(
        self, body: dict[str, Any], params: DecodingParams, version: int | None
    ) -> AsyncGenerator[SampleEvent]:
        body |= {"stream": True, "stream_interval": _TOKENS_PER_CHUNK}
        client = await self._async()
        request = client.build_request("POST", "/v1/completions", json=body)
        answer = await self._while_it_lives(client.send(request, stream=True))
        async with contextlib.aclosing(answer):
            if answer.status_code != 200:
                content = await self._while_it_lives(answer.aread())
                raise vllm_api.refusal(answer.status_code, content)
            lines = answer.aiter_lines()
            while (line := await self._while_it_lives(anext(lines, None))) is not None:
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RefusedError("stopped", f"vLLM: {chunk['error'].get('message')}")
                for choice in chunk["choices"]:
                    vllm_api.require_prompt(choice, body["prompt"])
                    for event in vllm_api.tokens(choice, params, version):
                        yield event
                    if choice["finish_reason"] is not None:
                        yield vllm_api.finish(choice)

    async def _constrained(
        self, body: dict[str, Any], params: DecodingParams, version: int | None
    ) -> AsyncGenerator[SampleEvent]:
        body["structured_outputs"] = vllm_api.structured(params.grammar or "")
        for choice in await self._complete(body, constrained=True):
            vllm_api.require_prompt(choice, body["prompt"])
            masked = list(vllm_api.tokens(choice, params, version))
            raw = await self._score(body, [event.token_id for event in masked], params)
            for event, (logprob, top) in zip(masked, raw, strict=True):
                yield TokenEvent(event.choice, event.token_id, logprob, top, version)
            mass = sum(logprob for logprob, _ in raw) - sum(event.logprob for event in masked)
            yield vllm_api.finish(choice, log_mass=mass)

    async def score(
        self, prompt_ids: Sequence[int], adapter: str | None, top: int
    ) -> list[TokenEvent]:
        if len(prompt_ids) >= self.context_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens, and vLLM scores fewer than "
                f"{self.context_length}"
            )
        load = self._use(adapter)
        model, version = (self._base, None) if load is None else (load.lora, load.version)
        ids = list(prompt_ids)
        try:
            scores = await self._scores(model, ids, top) if len(ids) > 1 else []
        except httpx.TransportError as error:
            raise _unanswered(error) from error
        finally:
            self._used(load)
        return [
            TokenEvent(0, token_id, logprob, likeliest, version)
            for token_id, (logprob, likeliest) in zip(ids[1:], scores, strict=True)
        ]

    def _use(self, adapter: str | None) -> _Load | None:
        load = None
        if adapter is not None:
            load = self._loads.get(adapter)
            if load is None:
                raise RefusedError("unknown_adapter", f"no adapter {adapter!r} is loaded")
            load.users += 1
        self._in_flight += 1
        return load

    def _used(self, load: _Load | None) -> None:
        self._in_flight -= 1
        if load is not None:
            load.users -= 1
            self._drop_if_unused(load)

    async def _score(
        self, body: dict[str, Any], answer: list[int], params: DecodingParams
    ) -> list[_Score]:
        """(log-prob, alternatives) of each of an answer's tokens, by the policy alone."""
        if not answer:
            return []
        ids = [*body["prompt"], *answer]
        return (await self._scores(body["model"], ids, params.top_logprobs))[-len(answer) :]

    async def _scores(self, model: str, ids: list[int], top: int) -> list[_Score]:
        """(log-prob, alternatives) of each of these tokens but the first."""
        [scored] = await self._complete(
            {
                "model": model,
                "prompt": ids,
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": top,
                "return_token_ids": True,
            }
        )
        found: list[_Score] = []
        for token, row in zip(ids[1:], scored["prompt_logprobs"][1:], strict=True):
            pairs = [(int(key), entry["logprob"]) for key, entry in row.items()]
            found.append((row[str(token)]["logprob"], vllm_api.likeliest(pairs, top)))
        return found

    async def _complete(
        self, body: dict[str, Any], *, constrained: bool = False
    ) -> list[dict[str, Any]]:
        answer = await self._post("/v1/completions", body)
        if answer.status_code != 200:
            raise vllm_api.refusal(answer.status_code, answer.content, constrained=constrained)
        return answer.json()["choices"]

    # ---- the server

    def _learn(self, server: httpx.Client) -> None:
        """What kind of server it is, and whether it is fit."""
        found = vllm_api.check(server, self._eos_ids[0])
        self._base, self._enforces_grammars = found.base, found.enforces_grammars
        self.context_length = min(self.context_length, found.context_length or 1 << 60)
        if not found.enforces_grammars:
            log.warning("vLLM: %s", vllm_api.NO_GRAMMARS)

    def _blocking(self) -> httpx.Client:
        url, path = vllm_api.address(self._url)
        return httpx.Client(
            base_url=url,
            headers=self._headers,
            transport=httpx.HTTPTransport(uds=path),
            timeout=httpx.Timeout(60.0),
        )

    async def _async(self) -> httpx.AsyncClient:
        """A client of the running event loop, which closes it when it ends.

        Raises:
            RefusedError: the server is lost. What is asked nevertheless might wait for ever.
        """
        if not self.healthy:
            raise self._out_of_use()
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            lifetime = self._new_client()
            client = await anext(lifetime)  # does not wait: nobody makes another meanwhile
            self._loop, self._lifetime, self._client = loop, lifetime, client
            self._waits = set()
        return self._client

    async def _post(
        self, path: str, body: Mapping[str, Any], limit_s: float | None = None
    ) -> httpx.Response:
        client = await self._async()
        timeout = httpx.Timeout(limit_s, connect=_CONNECT_S)
        return await self._while_it_lives(client.post(path, json=body, timeout=timeout))

    async def _while_it_lives(self, work: Awaitable[_T]) -> _T:
        """What the server says, however long that takes: a lost one may not close its sockets.

        Raises:
            RefusedError: the watch has lost the server.
        """
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                try:
                    return await work
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            if wait.expired():
                raise self._out_of_use() from error
            raise

    def _end_waits(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._waits:
            self._waits.pop().reschedule(now)

    async def _new_client(self) -> AsyncGenerator[httpx.AsyncClient]:
        """One client. An event loop that ends closes its generators, and this one its client."""
        url, path = vllm_api.address(self._url)
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=_KEEP_ALIVE_S
        )
        async with httpx.AsyncClient(
            base_url=url,
            headers=self._headers,
            transport=httpx.AsyncHTTPTransport(uds=path, limits=limits),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # an answer takes as long as it takes
        ) as client:
            yield client

    # ---- its death and return

    def _keep_watch(self) -> None:
        refused = 0
        with self._blocking() as server:
            while not self._stopping.wait(_POLL_S):
                try:
                    self._look_at(server)
                    refused = 0
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                    refused += 1  # twice: one may be a kept connection that timed out
                    if refused >= 2:
                        self._lost("it does not answer")
                except httpx.TransportError:  # slow; how long that may last ``healthy`` says
                    if self._heard != _NEVER and not self.healthy:
                        self._lost(_silence())
                except httpx.HTTPStatusError as error:
                    path, status = error.request.url.path, error.response.status_code
                    self._lost(f"{path} answers {status}")
                except (VllmError, RefusedError) as error:
                    self._lost(str(error))
                except Exception as error:  # a watch that ended would never see it come back
                    log.debug("watching vLLM failed", exc_info=True)
                    self._lost(f"{type(error).__name__}: {error}")

    def _look_at(self, server: httpx.Client) -> None:
        server.get("/health", timeout=_LOOK_S).raise_for_status()
        gone = self._missing(server)
        if gone or self._heard == _NEVER:
            self._restore(server, gone)
            if self._stopping.is_set():
                return
            if self._missing(server):  # the next round tries again
                self._in_vain += 1
                raise VllmError(_NOT_LISTED if self._in_vain >= _IN_VAIN else _LOST_ADAPTERS)
            self._in_vain = 0
            self._recoveries += 1
            self._trouble = ""
            log.warning("vLLM is back; loaded anew: %s", ", ".join(gone) or "nothing")
        self._heard = time.monotonic()
        self._stats = vllm_api.read_metrics(server.get("/metrics", timeout=_LOOK_S).text)

    def _missing(self, server: httpx.Client) -> dict[str, _Load]:
        """The adapters that the server should have and has not."""
        wanted = dict(self._loads)
        models = server.get("/v1/models", timeout=_LOOK_S).raise_for_status().json()["data"]
        there = {model["id"] for model in models}
        gone = {name: load for name, load in wanted.items() if load.lora not in there}
        # One that was replaced since it was listed may have been unloaded: that is no loss.
        return {name: load for name, load in gone.items() if self._loads.get(name) is load}

    def _restore(self, server: httpx.Client, gone: Mapping[str, _Load]) -> None:
        """Gives a server that was started anew what the one before it had."""
        if gone and self._heard != _NEVER:
            self._lost(_LOST_ADAPTERS)
        self._learn(server)
        for name, load in gone.items():
            if self._stopping.is_set():
                return
            self._unload_on(server, load.lora)  # another of its processes may have it
            again = _fresh_load(name, load.version, load.path)
            self._load_on(server, again)
            with self._replacing:
                if current := self._loads.get(name) is load:
                    self._loads[name] = again
            if not current:  # a newer version was published meanwhile
                self._unload_on(server, again.lora)

    def _load_on(self, server: httpx.Client, load: _Load) -> None:
        self._there.add(load.lora)
        answer = server.post("/v1/load_lora_adapter", json=load.request())
        vllm_api.require_loaded(answer, load.path)

    def _unload_on(self, server: httpx.Client, lora: str) -> None:
        server.post("/v1/unload_lora_adapter", json={"lora_name": lora})
        self._there.discard(lora)

    def _lost(self, why: str) -> None:
        """Takes it out of use, and ends what waits for its answers: agents ask again."""
        if why != self._trouble:
            log.warning("vLLM is out of use: %s", why)
        self._heard, self._trouble = _NEVER, why
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # a loop that has ended waits for nothing
                self._loop.call_soon_threadsafe(self._end_waits)


def _unanswered(error: httpx.TransportError) -> RefusedError:
    return RefusedError("stopped", f"vLLM does not answer: {type(error).__name__}: {error}")


def _up_to(wait_s: float | None) -> str:
    return "" if wait_s is None else f" up to {wait_s:g} s for it (vllm_wait)"


def _silence() -> str:
    return f"it has not answered for {_SILENCE_S:g} s"


def _fresh_load(name: str, version: int, path: str) -> _Load:
    try:
        experts = adapts_experts(path)
    except (OSError, ValueError):  # a server elsewhere may see it; or it says what is wrong
        experts = False
    return _Load(f"{name}@v{version}-{secrets.token_hex(4)}", version, path, experts)
