"""vLLM's HTTP API as of 0.32: the client with the server's health, the fitness check, request
bodies, and answers as our types."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import httpx

from agentrl_proxy.sampler import (
    DecodingParams,
    FinishEvent,
    FinishReason,
    GrammarError,
    RefusedError,
    TokenEvent,
)

_SILENCE_S = 60.0
"""A server that has not answered for this long is dead; a busy one only answers late."""
_CONNECT_S = 10.0
_KEEP_ALIVE_S = 2.0
"""Less than vLLM's 5 s, so that no request uses a connection that vLLM is about to close."""
_FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}
_METRICS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "reused_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:kv_cache_usage_perc": "kv_usage",
}
NO_GRAMMARS = (
    "this server does not enforce grammars in llguidance's form; start it with "
    """--structured-outputs-config '{"backend": "guidance"}'"""
)
_LOAD_ADVICE = (
    "the server needs --enable-lora, --max-lora-rank no less than the adapter's rank, and must see "
    "the run's folder under this very path"
)
_LAG_ADVICE = (
    "if that lasts, its file system lags behind the trainer's: mount the run's folder there with a "
    "shorter attribute cache (NFS: actimeo=1), then resume"
)
_HALF = {"(char ": "adapter_config.json", "deserializing header": "adapter_model.safetensors"}
"""How Python's and safetensors' errors about a file that was cut can be told."""
_NOT_FOUND = ("No adapter found", "doesn't contain tensors")
_UNFIT = ("max_lora_rank", "target modules", "Adapter bias is not supported")
"""What vLLM says of an adapter's files: they are not there, or never fit. Its status is often 500,
as where its engine is in trouble."""


Score = tuple[float, list[tuple[int, float]] | None]
"""A token's log-prob, and the likeliest tokens in its place."""


class VllmError(RuntimeError):
    """The server cannot be used as it is; the message says what to change."""


class Fitness(NamedTuple):
    """What ``check`` found."""

    base: str = ""
    """The server's name of the base model."""
    context_length: int | None = None
    enforces_grammars: bool = False


class VllmClient:
    """Requests from threads (``blocking``) and from event loops (``connection``).

    ``recovery`` marks the server as healthy or lost; requests fail while it is lost.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        """``url``: of the server, without ``/v1``; ``unix:/path`` for a socket."""
        self.url = url
        self.trouble = "it has not been checked yet"
        """Why the server is lost; empty: it is not."""
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._options: dict[str, Any] = {
            "base_url": "http://vllm" if self._socket else url.rstrip("/").removesuffix("/v1"),
            "headers": {"authorization": f"Bearer {api_key}"} if api_key else {},
        }
        transport = httpx.HTTPTransport(uds=self._socket)
        self.blocking = httpx.Client(transport=transport, timeout=60.0, **self._options)
        self._heard_at = 0.0
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lifetime: AsyncGenerator[httpx.AsyncClient] | None = None

    @property
    def healthy(self) -> bool:
        return not self.trouble and time.monotonic() - self._heard_at < _SILENCE_S

    def mark_healthy(self) -> None:
        self._heard_at, self.trouble = time.monotonic(), ""

    def mark_lost(self, why: str) -> None:
        """Fail requests from now on, and end those in progress: the server may never answer them,
        nor close their sockets."""
        self.trouble = why
        client, loop = self._client, self._loop
        if client is not None and loop is not None:
            self._client = None
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: loop.create_task(client.aclose()))

    def unavailable(self, error: Exception | None = None) -> RefusedError:
        """Return the error for a request that the server does not answer."""
        if self.healthy and error is not None:
            return RefusedError("stopped", f"vLLM does not answer: {type(error).__name__}: {error}")
        why = self.trouble or "it does not answer"
        return RefusedError("stopped", f"vLLM is out of use: {why}")

    async def connection(self) -> httpx.AsyncClient:
        """Return the running event loop's client, which closes when the loop ends.

        Raises:
            RefusedError: the server is lost.
        """
        if not self.healthy:
            raise self.unavailable()
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._lifetime = self._new_client()
            self._client = await anext(self._lifetime)  # does not suspend
            self._loop = loop
        return self._client

    async def _new_client(self) -> AsyncGenerator[httpx.AsyncClient]:
        """Yield one client; an event loop that ends closes its generators, and so the client."""
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=_KEEP_ALIVE_S
        )
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=self._socket, limits=limits),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # sampling takes as long as it takes
            **self._options,
        ) as client:
            yield client


def why_not_up(server: httpx.Client, timeout_s: float) -> str | None:
    """Say why a server is not ready yet; None: it is.

    Raises:
        VllmError: it will never be: it is no vLLM server.
    """
    try:
        answer = server.get("/health", timeout=timeout_s)
    except httpx.TransportError as error:
        return str(error) or type(error).__name__
    if answer.status_code // 100 == 5:  # vLLM's own, or a proxy's in front of it
        return f"/health answers {answer.status_code}"
    _require_vllm(answer)
    return None


def check(server: httpx.Client, eos_id: int) -> Fitness:
    """Check that a server's answers can be trained on.

    Raises:
        VllmError: they cannot; or the server wants an API key; or it is no vLLM server.
        httpx.HTTPError: it does not answer.
    """
    models = server.get("/v1/models")
    _require_vllm(models)
    models.raise_for_status()
    # With top_k = 1, processed log-probs would be 0 for one token and -inf for the others.
    probe = {
        "prompt": [eos_id], "max_tokens": 1, "top_k": 1, "temperature": 1.0, "logprobs": 2,
        "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    try:
        card = models.json()["data"][0]
        base = card["id"]
        answer = server.post("/v1/completions", json={"model": base} | probe)
        if answer.status_code != 200:
            raise VllmError(f"vllm: the server refuses a probe: {answer.text[:500]}")
        [choice] = answer.json()["choices"]
        if choice.get("token_ids") is None:
            raise VllmError("vllm: the server returns no token ids; vLLM 0.11 or newer does")
        values = sorted(choice["logprobs"]["top_logprobs"][0].values())[-2:]
        if values[0] < -9000 or values[1] > 0:
            raise VllmError("vllm: start the server with --logprobs-mode raw_logprobs")
        routes = server.get("/openapi.json")
        if routes.status_code == 200 and "/v1/load_lora_adapter" not in routes.json()["paths"]:
            raise VllmError(
                "vllm: the server takes no adapters at run time; start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
            )
        # Sent now: vLLM has one grammar backend per engine and the first request chooses it.
        grammar = {"prompt": [eos_id], "structured_outputs": structured('start: "a"')}
        probed = server.post("/v1/completions", json={"model": base, "max_tokens": 2} | grammar)
        return Fitness(base, card.get("max_model_len"), probed.status_code == 200)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise _no_vllm(server.base_url, f"it answers otherwise ({what})") from error


def _require_vllm(answer: httpx.Response) -> None:
    status, url = answer.status_code, answer.request.url
    if status in (401, 403):
        raise VllmError(
            "vllm: the server wants an API key; name its variable in sampler.vllm.key_env"
        )
    if status // 100 not in (2, 5):
        raise _no_vllm(url.join("/"), f"{url.path} answers {status}")


def _no_vllm(url: httpx.URL, why: str) -> VllmError:
    return VllmError(f"sampler.vllm.url: what is at {url} seems to be no vLLM server: {why}")


def completion(
    model: str,
    prompt_ids: Sequence[int],
    params: DecodingParams,
    max_tokens: int,
    eos_ids: Sequence[int],
) -> dict[str, Any]:
    """Return the body of a sampling request.

    It sets every field, because vLLM takes others from the model's generation config.
    """
    greedy_of_many = params.temperature == 0 and params.n > 1  # vLLM refuses that
    body: dict[str, Any] = {
        "model": model, "prompt": list(prompt_ids), "max_tokens": max_tokens, "n": params.n,
        "temperature": 1.0 if greedy_of_many else params.temperature,
        "top_p": params.top_p, "top_k": 1 if greedy_of_many else params.top_k, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop": list(params.stop), "stop_token_ids": list(eos_ids),
        "skip_special_tokens": False,  # a stop string may be one
        "logprobs": params.top_logprobs, "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    if params.seed is not None:
        # Choice i samples from vLLM's seed + i, so close seeds would share streams: spread them.
        digest = blake2b(str(params.seed).encode(), digest_size=8).digest()
        body["seed"] = int.from_bytes(digest, "big") >> 2
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return body


def scoring(model: str, ids: Sequence[int], top: int) -> dict[str, Any]:
    """Return the body of a request that scores ``ids``."""
    body = {"model": model, "prompt": list(ids), "prompt_logprobs": top}
    return body | {"max_tokens": 1, "temperature": 0.0, "return_token_ids": True}


def structured(grammar: str) -> dict[str, str]:
    """Return ``structured_outputs``; only llguidance accepts the first line."""
    return {"grammar": f"%llguidance {{}}\n{grammar}"}


def tokens(
    choice: dict[str, Any], prompt: list[int], params: DecodingParams, version: int | None
) -> list[TokenEvent]:
    """Return the tokens of an answer, or of a part of one.

    Raises:
        VllmError: vLLM consumed a prompt other than ``prompt``.
    """
    if choice.get("prompt_token_ids") not in (None, prompt):
        raise VllmError("vLLM consumed a prompt other than the one sent")
    found = choice["logprobs"]
    events: list[TokenEvent] = []
    for i, token_id in enumerate(choice["token_ids"]):
        top = None
        if params.top_logprobs:
            named = found["top_logprobs"][i].items()
            pairs = [(int(name.removeprefix("token_id:")), value) for name, value in named]
            top = _likeliest(pairs, params.top_logprobs)
        logprob = found["token_logprobs"][i]
        events.append(TokenEvent(choice["index"], token_id, logprob, top, version))
    return events


def scores(choice: dict[str, Any], ids: Sequence[int], top: int) -> list[Score]:
    """Return the scores of each scored token but the first, with ``top`` likeliest tokens."""
    found: list[Score] = []
    for token, row in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        pairs = [(int(key), entry["logprob"]) for key, entry in row.items()]
        found.append((row[str(token)]["logprob"], _likeliest(pairs, top)))
    return found


def _likeliest(pairs: list[tuple[int, float]], count: int) -> list[tuple[int, float]] | None:
    """Drop the sampled token, which vLLM always lists, unless it is among the likeliest."""
    return sorted(pairs, key=lambda pair: -pair[1])[:count] if count else None


def finish(choice: dict[str, Any], log_mass: float | None = None) -> FinishEvent:
    said, by = choice["finish_reason"], choice["stop_reason"]
    reason = _FINISH.get(said, "error")
    error = f"vLLM ended the answer: {said}" if reason == "error" else None
    stop = by if isinstance(by, str) else None
    return FinishEvent(choice["index"], reason, error, stop, log_mass)


def refusal(answer: httpx.Response, *, constrained: bool = False) -> Exception:
    """Return the error of an answer that is not 200 and has been read."""
    status, message = answer.status_code, f"vLLM: {_message(answer)}"
    if status == 400 and constrained:
        return GrammarError(message)
    if status in (400, 422):
        return RefusedError("invalid_parameter", message)
    return RefusedError("stopped", f"{message} (status {status})")


def require_loaded(answer: httpx.Response, path: str) -> None:
    """
    Raises:
        RefusedError: the server does not take the adapter. ``invalid_parameter`` if a retry would
            not help; vLLM answers 400 while its engine is dying, too. ``files_not_found`` if it
            does not see the files.
    """
    status = answer.status_code
    if status == 200:
        return
    said = _message(answer)
    text = f"vLLM did not load {path} ({status}): "
    for phrase, file in _HALF.items():
        if phrase in said:
            text += f"{file} is not whole where the server reads it: {said[:400]}"
            raise RefusedError("files_not_found", f"{text}; {_LAG_ADVICE}")
    text += said[:400]
    if any(phrase in said for phrase in _NOT_FOUND):
        raise RefusedError("files_not_found", f"{text}; {_LOAD_ADVICE}")
    unfit = any(phrase in said for phrase in _UNFIT)
    if not unfit and (status // 100 != 4 or status in (408, 429)):
        raise RefusedError("stopped", text)
    raise RefusedError("invalid_parameter", f"{text}; {_LOAD_ADVICE}")


def _message(answer: httpx.Response) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(answer.json()["error"]["message"])
    return answer.text[:500]


def read_metrics(text: str) -> dict[str, float]:
    """Read the counters that ``stats`` reports, summed over engines."""
    found = dict.fromkeys(_METRICS.values(), 0.0)
    for line in text.splitlines():
        name = _METRICS.get(line.partition("{")[0])
        if name is not None:
            found[name] += float(line.rpartition(" ")[2])
    return found
