"""How the sampler runs a model over rows: the strategies, and the choice of one that is exact.

The quickest strategy that applies to the model and reproduces the logits of a plain run is taken.
``Scorer`` runs the trainer's forward over whole rows instead.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from transformers import PreTrainedConfig

from agentrl_trainer.data.packing import pack
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.inference.batched_forward import BatchedForward
from agentrl_trainer.inference.kv_cache import Part
from agentrl_trainer.inference.llama_cpu import LlamaCpuForward
from agentrl_trainer.inference.prefix_cache import KVPool
from agentrl_trainer.inference.recurrent_cache import Past, RowByRowForward
from agentrl_trainer.inference.requests import Scored
from agentrl_trainer.learner.logprobs import TokenLogprobs, scatter
from agentrl_trainer.learner.model_support import shrunk_windows
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.sources import ModelError

log = logging.getLogger(__name__)

_TOKENS, _CUDA_TOKENS = 4096, 16384
"""Tokens that are scored in one forward."""

Forward: TypeAlias = BatchedForward | RowByRowForward
"""One way of running a model over rows. Its class says when it applies.

``forward(parts)`` returns, for each part, logits ``[wanted, vocab]`` after the last token of each
wanted chunk. ``new_rows`` made the parts' rows, which are different ones.
"""

STRATEGIES: tuple[tuple[str, float, Callable[[BaseModel, dict[str, Any]], Forward]], ...] = (
    ("batched", 2e-4, BatchedForward),
    ("batched", 2e-4, partial(BatchedForward, by_rule=True)),
    ("row by row", 2e-4, partial(RowByRowForward, past=Past.CHUNKS)),
    ("row by row", 2e-4, partial(RowByRowForward, past=Past.STEPS)),
    ("row by row, recomputed", 2e-4, partial(RowByRowForward, past=Past.NONE)),
)
"""Name as in docs/models.md, largest relative difference in float32 to a plain run's logits, and
the class, which raises ValueError for a model that it does not apply to. Quickest first."""

_PROBE_CHUNKS = ((16, 2, 1, 4, 1), (9, 3, 1, 1, 3))
"""How the two probe rows are fed. Some models forget their state when they get several tokens on
top of it, which shows best directly behind them; the rows are longer than shrunk windows."""


@torch.inference_mode()
def choose_forward(base: BaseModel, *, llama_cpu: bool) -> tuple[str, Forward, str | None]:
    """Return the first strategy that computes what a plain run of the model does, and its name.

    Also returns why ``LlamaCpuForward`` was refused, None if it was not (or ``llama_cpu`` is off).
    Raises:
        ModelError: no strategy reproduces a plain run.
    """
    model: Any = base.model
    accepted = inspect.signature(type(model).forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    attention = cast(str, model.config._attn_implementation)
    lean = ("llama cpu", 1e-4, LlamaCpuForward)
    strategies = (lean, *STRATEGIES) if llama_cpu else STRATEGIES
    refused: list[tuple[str, str]] = []
    with shrunk_windows(model):
        tokens = [(i * 7919 + 13) % vocabulary(base) for i in range(30)]
        first, second = map(sum, _PROBE_CHUNKS)
        rows = [tokens[:first], tokens[3 : 3 + second]]
        inputs = [torch.tensor([row], device=base.device) for row in rows]
        plain = [model(input_ids=ids, use_cache=False).logits[0].float() for ids in inputs]
        scale = max(1.0, *(float(logits.abs().max()) for logits in plain))
        for name, tolerance, construct in strategies:
            if model.config._attn_implementation != attention:
                model.set_attn_implementation(attention)
            try:
                forward = construct(base, options)
                worst = _worst_difference(forward, rows, plain)
                if worst <= (tolerance if base.dtype == torch.float32 else 0.1) * scale:
                    break
                raise ValueError(f"its logits differ by {worst:.2g} from a plain run")
            except Exception as error:  # a model's own code may raise anything
                why = str(error) if isinstance(error, ValueError) else repr(error)
                refused.append((name, why))
                log.debug("%s is not sampled %s: %s", base.name, name, why)
        else:
            tried = "; ".join(f"{name}: {why}" for name, why in refused)
            raise ModelError(
                f"model: the embedded sampler cannot serve {base.name!r} "
                f"({model.config.model_type}). Sample with vLLM (sampler.kind), or use another "
                f"model. Strategies tried: {tried}."
            )
    if isinstance(forward, RowByRowForward):
        log.warning(
            "model: the embedded sampler computes %s (%s) %s, which is slow: with a GPU, sample "
            "with vLLM (sampler.kind).",
            base.name, model.config.model_type, name,
        )  # fmt: skip
    return name, forward, refused[0][1] if llama_cpu and refused else None


def vocabulary(base: BaseModel) -> int:
    """Return the number of logits, which may be more than the tokenizer has tokens."""
    return cast(torch.nn.Embedding, base.model.get_input_embeddings()).weight.shape[0]


def _worst_difference(
    forward: Forward, tokens: list[list[int]], expected: list[torch.Tensor]
) -> float:
    """Largest difference to ``expected`` after each of several chunks; NaN if any logit is."""
    rows = forward.new_rows(KVPool(10**9))
    rows.reserve(len(tokens), max(map(len, tokens)))
    for row in tokens:
        rows.append(row)
    worst = expected[0].new_zeros(())
    done = [0] * len(tokens)
    for sizes in zip(*_PROBE_CHUNKS, strict=True):
        chunks = [t[at : at + n] for t, at, n in zip(tokens, done, sizes, strict=True)]
        (logits,) = forward([Part(rows, chunks, done)])
        done = [at + n for at, n in zip(done, sizes, strict=True)]
        for found, plain, at in zip(logits.float(), expected, done, strict=True):
            worst = torch.maximum(worst, (found - plain[at - 1]).abs().max())
    return float(worst)


class Scorer:
    """Log-probs of whole rows under the active adapter.

    By the trainer's ``TokenLogprobs``, so that sampler and trainer agree.
    """

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._logprobs: TokenLogprobs | None = None

    def __call__(self, rows: Sequence[list[int]], top: int, version: int | None) -> list[Scored]:
        """Score rows, with the ``top`` likeliest tokens at each position.

        The trainer's forward changes the attention in every config, which is restored: the towers
        of a multimodal model may not support what its language model does.
        """
        modules: list[Any] = [getattr(m, "config", None) for m in self._base.model.modules()]
        configs = {id(c): c for c in modules if isinstance(c, PreTrainedConfig)}.values()
        before = [(c, c._attn_implementation_internal) for c in configs]
        found = [Scored([0.0] * len(row), [[] for _ in row], version) for row in rows]
        try:
            # Constructed at first use, because it tries out what the model allows.
            self._logprobs = compute = self._logprobs or TokenLogprobs(self._base.model)
            blank = [[0.0] * len(row) for row in rows]
            batches = pack(
                [
                    TrainingRow(row, [at > 0 for at in range(len(row))], zeros, zeros)
                    for row, zeros in zip(rows, blank, strict=True)
                ],
                token_budget=_CUDA_TOKENS if self._base.device.type == "cuda" else _TOKENS,
                share=compute.why_padded is None,
            )
            for batch in (packed.to(self._base.device) for packed in batches):
                scatter(batch, compute(batch), [scored.logprobs for scored in found])
                if top:
                    ids, values = (part.tolist() for part in compute.likeliest(batch, top))
                    places = zip(batch.rows.tolist(), batch.columns.tolist(), strict=True)
                    for (row, column), *best in zip(places, ids, values, strict=True):
                        found[batch.indices[row]].top[column + 1] = list(zip(*best, strict=True))
        finally:
            for config, attention in before:
                config._attn_implementation_internal = attention
        return found
