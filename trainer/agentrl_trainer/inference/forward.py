"""How the sampler runs a model over rows: the strategies, and the choice of one that is exact.

The quickest strategy that applies to the model and reproduces the logits of a plain run is taken.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import torch

from agentrl_trainer.inference.batched_forward import (
    BatchedForward,
    LlamaCpuForward,
    WindowedForward,
)
from agentrl_trainer.inference.kv_cache import KVBudget, KVShape, Rows
from agentrl_trainer.inference.recurrent_cache import Past, RowByRowForward
from agentrl_trainer.models.loading import BaseModel, ModelError
from agentrl_trainer.models.shrink_windows import shrunk_windows

log = logging.getLogger(__name__)


class Forward(Protocol):
    """One way of running a model over rows. Its class says when it applies."""

    @property
    def name(self) -> str:
        """As in docs/models.md."""
        ...

    @property
    def tolerance(self) -> float:
        """Largest relative difference in float32 between its logits and a plain run's."""
        ...

    @property
    def shape(self) -> KVShape:
        """What a token of a row costs in memory."""
        ...

    def new_rows(self, budget: KVBudget) -> Rows: ...

    def __call__(
        self, rows: Rows, chunks: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> torch.Tensor:
        """Logits ``[batch, vocab]`` after the last token of each chunk.

        Row i of ``rows``, which ``new_rows`` made, holds ``starts[i]`` tokens and gets
        ``chunks[i]`` appended.
        """
        ...


_Strategy: TypeAlias = Callable[[BaseModel, dict[str, Any]], Forward]

STRATEGIES: tuple[_Strategy, ...] = (
    LlamaCpuForward,
    BatchedForward,
    WindowedForward,
    *(partial(RowByRowForward, past=past) for past in Past),
)
"""Quickest first. Each raises ValueError for a model that it does not apply to."""

_PROBE_CHUNKS = ((16, 2, 1, 4, 1), (9, 3, 1, 1, 3))
"""How the two probe rows are fed. Some models forget their state when they get several tokens on
top of it, which shows best directly behind them; the rows are longer than shrunk windows."""


@torch.inference_mode()
def choose_forward(base: BaseModel, *, llama_cpu: bool) -> tuple[Forward, str | None]:
    """Return the first strategy that computes what a plain run of the model does.

    Also returns why ``LlamaCpuForward`` was refused, None if it was not (or ``llama_cpu`` is off).

    Raises:
        ModelError: no strategy reproduces a plain run.
    """
    model: Any = base.model
    accepted = inspect.signature(type(model).forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    attention = cast(str, model.config._attn_implementation)
    why: list[str] = []
    refused: str | None = None
    with shrunk_windows(model):
        rows = _probe_rows(vocabulary(base))
        plain = [_plain_logits(model, row) for row in rows]
        scale = max(1.0, *(float(logits.abs().max()) for logits in plain))
        for strategy in STRATEGIES[not llama_cpu :]:
            if model.config._attn_implementation != attention:
                model.set_attn_implementation(attention)
            name = getattr(strategy, "name", "row by row")
            try:
                forward = strategy(base, options)
                name = forward.name
                worst = _worst_difference(forward, rows, plain)
            except Exception as error:  # a model's own code may raise anything
                why.append(f"{name}: {type(error).__name__}: {error}")
                said = str(error)
            else:
                exact = forward.tolerance if base.dtype == torch.float32 else 0.1
                if worst <= exact * scale:
                    break
                why.append(f"{name}: logits differ by {worst:.2g} from a plain run")
                said = f"its logits differ by {worst:.2g}"
            if strategy is LlamaCpuForward:
                refused = said
        else:
            raise ModelError(
                f"model: the embedded sampler cannot serve {base.name!r} "
                f"({model.config.model_type}). Sample with vLLM (sampler: vllm), or use another "
                f"model. Strategies tried: {'; '.join(why)}."
            )
    if isinstance(forward, RowByRowForward):
        log.warning(
            "model: the embedded sampler computes %s (%s) %s, which is slow: with a GPU, sample "
            "with vLLM (sampler: vllm).",
            base.name, model.config.model_type, forward.name,
        )  # fmt: skip
    for line in why:
        log.debug("%s is not sampled from %s", base.name, line)
    return forward, refused


def vocabulary(base: BaseModel) -> int:
    """Return the number of logits, which may be more than the tokenizer has tokens."""
    return cast(torch.nn.Embedding, base.model.get_input_embeddings()).weight.shape[0]


def _probe_rows(vocab: int) -> list[list[int]]:
    tokens = [(i * 7919 + 13) % vocab for i in range(30)]
    first, second = (sum(chunks) for chunks in _PROBE_CHUNKS)
    return [tokens[:first], tokens[3 : 3 + second]]


def _plain_logits(model: Any, row: list[int]) -> torch.Tensor:
    ids = torch.tensor([row], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0].float()


def _worst_difference(
    forward: Forward, tokens: Sequence[list[int]], expected: Sequence[torch.Tensor]
) -> float:
    """Largest difference to ``expected`` after each of several chunks; NaN if any logit is."""
    rows = forward.new_rows(KVBudget(10**9))
    rows.reserve(len(tokens), max(map(len, tokens)))
    for _ in tokens:
        rows.append()
    worst = torch.zeros((), device=expected[0].device)
    done = [0] * len(tokens)
    for sizes in zip(*_PROBE_CHUNKS, strict=True):
        chunks = [t[at : at + n] for t, at, n in zip(tokens, done, sizes, strict=True)]
        logits = forward(rows, chunks, done).float()
        done = [at + n for at, n in zip(done, sizes, strict=True)]
        for found, plain, at in zip(logits, expected, done, strict=True):
            worst = torch.maximum(worst, (found - plain[at - 1]).abs().max())
    return float(worst)
