"""vLLM's HTTP API: requests and answers as our types.

Knows what vLLM 0.32 says on the wire and what a server must be like to be trained on. Does not know
when what is asked, nor which adapters there are: that is ``agentrl.samplers.vllm.sampler``'s.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import httpx

from agentrl_proxy.sampler import (
    DecodingParams,
    FinishEvent,
    FinishReason,
    GrammarError,
    RefusedError,
    TokenEvent,
)

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


class VllmError(RuntimeError):
    """The server cannot be used as it is; the message says what to change."""


def address(url: str) -> tuple[str, str | None]:
    """(base URL, socket path)."""
    if url.startswith("unix:"):
        return "http://vllm", url.removeprefix("unix:")
    return url.rstrip("/").removesuffix("/v1"), None


def structured(grammar: str) -> dict[str, str]:
    """Only llguidance reads the first line: no backend takes the rest for its own dialect."""
    return {"grammar": f"%llguidance {{}}\n{grammar}"}


@dataclass(frozen=True, slots=True)
class Fitness:
    """What ``check`` found."""

    base: str  # the server's name of the base model
    context_length: int | None
    enforces_grammars: bool


def why_not_up(server: httpx.Client, timeout_s: float) -> str | None:
    """Why a server is not ready, though it may become so; None: it is.

    Raises:
        VllmError: it will not: it is no vLLM server.
    """
    try:
        status = server.get("/health", timeout=timeout_s).status_code
    except httpx.TransportError as error:
        return str(error) or type(error).__name__
    if status == 200:
        return None
    _require_key(status)
    if status // 100 == 5:  # of a proxy in front as well
        return f"/health answers {status}"
    raise VllmError(f"{_no_vllm(server)}: /health answers {status}")


def check(server: httpx.Client, eos_id: int) -> Fitness:
    """Asks a server whether its answers can be trained on.

    Raises:
        VllmError: they cannot; or it asks for a key; or it is no vLLM.
        httpx.HTTPError: it does not answer.
    """
    try:
        return _check(server, eos_id)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise VllmError(f"{_no_vllm(server)}: it answers otherwise ({what})") from error


def _no_vllm(server: httpx.Client) -> str:
    return f"vllm_url: what is at {server.base_url} seems to be no vLLM server"


def _require_key(status: int) -> None:
    if status in (401, 403):
        raise VllmError("vllm: the server wants an API key; name its variable in vllm_key_env")


def _check(server: httpx.Client, eos_id: int) -> Fitness:
    models = server.get("/v1/models")
    _require_key(models.status_code)
    if models.status_code == 404:
        raise VllmError(f"{_no_vllm(server)}: /v1/models answers 404")
    models.raise_for_status()
    card = models.json()["data"][0]
    base = card["id"]
    # Of one token out of one, the processed log-prob would be 0 and the others' -inf.
    probe = {"model": base, "prompt": [eos_id], "max_tokens": 1, "top_k": 1}
    probe |= {"temperature": 1.0, "logprobs": 2, "ignore_eos": True}
    probe |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = server.post("/v1/completions", json=probe)
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

    # Asked at once: vLLM has one backend per engine, and by default the first request chooses.
    probe = {"model": base, "prompt": [eos_id], "max_tokens": 2}
    probe |= {"structured_outputs": structured('start: "a"')}
    enforces = server.post("/v1/completions", json=probe).status_code == 200
    return Fitness(base, card.get("max_model_len"), enforces)


def completion(
    model: str,
    prompt_ids: Sequence[int],
    params: DecodingParams,
    max_tokens: int,
    eos_ids: Sequence[int],
) -> dict[str, Any]:
    """The request that samples.

    Everything is said: what is not, a server takes from the model's generation config.
    """
    greedy_of_many = params.temperature == 0 and params.n > 1  # vLLM refuses that
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt_ids),
        "max_tokens": max_tokens,
        "temperature": 1.0 if greedy_of_many else params.temperature,
        "top_p": params.top_p,
        "top_k": 1 if greedy_of_many else params.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": params.n,
        "logprobs": params.top_logprobs,
        "stop": list(params.stop),
        "stop_token_ids": list(eos_ids),
        "skip_special_tokens": False,  # a stop string may be one
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if params.seed is not None:
        body["seed"] = _seed(params.seed)
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return body


def require_loaded(answer: httpx.Response, path: str) -> None:
    """
    Raises:
        RefusedError: the server does not take the adapter. ``invalid_parameter``: nor will it when
            asked again, unless its engine is dying, which vLLM says with a 400 too.
    """
    status = answer.status_code
    if status == 200:
        return
    text = f"vLLM did not load {path} ({status}): {_message(answer.content)[:400]}"
    if status // 100 != 4 or status in (408, 429):
        raise RefusedError("stopped", text)
    raise RefusedError("invalid_parameter", f"{text}; {_LOAD_ADVICE}")


def _seed(seed: int) -> int:
    """Choice i of a request samples from vLLM's seed + i: spread, so that streams do not meet."""
    digest = blake2b(str(seed).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def tokens(
    choice: dict[str, Any], params: DecodingParams, version: int | None
) -> Iterator[TokenEvent]:
    ids: list[int] = choice["token_ids"]
    if not ids:
        return
    found = choice["logprobs"]
    for i, (token_id, logprob) in enumerate(zip(ids, found["token_logprobs"], strict=True)):
        top = None
        if params.top_logprobs:
            named = found["top_logprobs"][i].items()
            pairs = [(int(name.removeprefix("token_id:")), value) for name, value in named]
            top = likeliest(pairs, params.top_logprobs)
        yield TokenEvent(choice["index"], token_id, logprob, top, version)


def likeliest(pairs: list[tuple[int, float]], count: int) -> list[tuple[int, float]] | None:
    """vLLM lists the sampled token as well, whether it is one of them or not."""
    return sorted(pairs, key=lambda pair: -pair[1])[:count] if count else None


def finish(choice: dict[str, Any], log_mass: float | None = None) -> FinishEvent:
    said, by = choice["finish_reason"], choice["stop_reason"]
    reason = _FINISH.get(said, "error")
    error = f"vLLM ended the answer: {said}" if reason == "error" else None
    return FinishEvent(
        choice["index"], reason, error, by if isinstance(by, str) else None, log_mass
    )


def require_prompt(choice: dict[str, Any], prompt: list[int]) -> None:
    consumed = choice.get("prompt_token_ids")
    if consumed is not None and consumed != prompt:
        raise VllmError("vLLM consumed another prompt than it was sent")


def refusal(status: int, content: bytes, *, constrained: bool = False) -> Exception:
    message = _message(content)
    if status == 400 and constrained:
        return GrammarError(f"vLLM: {message}")
    if status in (400, 422):
        return RefusedError("invalid_parameter", f"vLLM: {message}")
    return RefusedError("stopped", f"vLLM answered {status}: {message}")


def _message(content: bytes) -> str:
    text = content.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return text[:500]


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus's text format, summed over engines; only what ``stats`` tells."""
    found = dict.fromkeys(_METRICS.values(), 0.0)
    for line in text.splitlines():
        name = _METRICS.get(line.partition("{")[0])
        if name is not None:
            found[name] += float(line.rpartition(" ")[2])
    return found
