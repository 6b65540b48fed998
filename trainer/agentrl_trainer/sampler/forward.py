"""One forward of the model over rows of a RowCache, and the check that this model allows it.

Knows: transformers models, attention. Does not know: requests, sampling, adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl_trainer.model import BaseModel, ModelError
from agentrl_trainer.sampler.cache import TIME_STEP, Budget, KVShape, RowCache
from agentrl_trainer.sampler.lean import LeanDecoder

ATTENTION = "agentrl_sdpa"
BLOCK = 16
"""Rows which a decode step attends over together, as far as the longest of them."""
_WORTH = 1024
"""Tokens of padding that must be saved for a block to be computed apart."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """SDPA which, for one new token per row, never copies the cache.

    transformers repeats keys and values for grouped-query attention whenever there is a mask: at a
    batch of 64 and 1,000 tokens that copy costs nine times the attention. With a single query the
    heads of a group can stand in for query positions instead. Query ``[batch, heads, new, dim]``.
    """
    batch, heads, new, dim = query.shape
    groups = key.shape[1]
    if new != 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask,
            dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs,  # type: ignore[arg-type]
        )  # fmt: skip
    out = F.scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups, dim),
        key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling,
    )  # fmt: skip
    return out.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class Forward:
    """Runs the model. Construction proves that the model can be served this way, or raises.

    ``lean``: by ``LeanDecoder`` if that computes what the model does; only as long as the model's
    linear layers stay what they are, their weights excepted.
    """

    def __init__(self, base: BaseModel, *, lean: bool = False) -> None:
        self.model = base.model
        self.device = base.device
        embedding = cast(torch.nn.Embedding, base.model.get_input_embeddings())
        self.vocab = embedding.weight.shape[0]
        self.shape = _kv_shape(base)
        self._additive = not getattr(base.model, "_supports_sdpa", False)
        self.lean: LeanDecoder | None = None
        self.why_not_lean: str | None = None
        """Why ``lean`` is not used although it was wanted."""
        self._run = torch.empty(0)
        self._self_check(base, lean)

    def __call__(
        self, rows: RowCache, chunks: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> torch.Tensor:
        """Logits ``[batch, vocab]`` after the last token of each chunk.

        Row i of ``rows`` holds ``starts[i]`` tokens and gets ``chunks[i]`` on top. Shorter chunks
        are padded by *repeating their last token at its own position*: it overwrites itself with
        the same keys, and the last column holds every row's last token.
        """
        if all(len(chunk) == 1 for chunk in chunks):
            ids: list[list[int]] = [list(chunk) for chunk in chunks]
            places: list[list[int]] = [[start] for start in starts]
            end = max(starts) + 1
        else:
            ids, places = _padded(chunks, starts)
            end = max(at[-1] for at in places) + 1
        token_ids, positions = torch.tensor([ids, places], device=self.device)
        view = min(-(-end // TIME_STEP) * TIME_STEP, rows.time)
        rows.begin(positions, view)
        mask = self._mask(positions, view)
        if self.lean is not None:
            blocks = _blocks(starts, view) if token_ids.shape[1] == 1 else []
            return self.lean(rows, token_ids, positions, mask, end, blocks)
        out = self.model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=rows,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _mask(self, positions: torch.Tensor, view: int) -> torch.Tensor:
        """``[batch, 1, new, view]``: a token sees those before it and itself.

        Whatever the position, that is a window on one run of *seen* and then *unseen*.
        """
        if (reach := len(self._run) // 2) < view:
            reach = 2 * view
            # Eager attention adds its mask; SDPA would convert a boolean one in every layer.
            adds = self._additive or self.lean is not None
            lowest = torch.finfo(self.model.dtype).min
            seen, unseen, dtype = (0.0, lowest, self.model.dtype) if adds else (1, 0, torch.bool)
            self._run = torch.full((2 * reach,), unseen, dtype=dtype, device=self.device)
            self._run[:reach] = seen
        windows = self._run.unfold(0, view, 1).index_select(0, reach - 1 - positions.flatten())
        return windows.view(len(positions), 1, -1, view)

    @torch.inference_mode()
    def _self_check(self, base: BaseModel, lean: bool) -> None:
        """Compare with a plain forward: two rows of different length, each fed in two chunks."""
        tokens = [(i * 7919 + 13) % self.vocab for i in range(30)]
        first, second = tokens[:24], tokens[3:20]
        expected = torch.stack(
            [
                base.model(torch.tensor([t], device=self.device)).logits[0, -1].float()
                for t in (first, second)
            ]
        )
        implementation = "eager" if self._additive else ATTENTION
        base.model.set_attn_implementation(implementation)
        scale = max(float(expected.abs().max()), 1.0)
        if lean:
            try:
                self.lean = LeanDecoder(base.model)
                if (worst := self._worst(first, second, expected)) <= 1e-4 * scale:
                    return
                why = f"its logits differ by {worst:.2g}"
            except (ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError) as no:
                why = str(no)
            self.lean, self.why_not_lean = None, why
            self._run = torch.empty(0)
        try:
            worst = self._worst(first, second, expected)
        except Exception as error:
            raise ModelError(_cannot(base, f"its forward rejects our cache: {error}")) from error
        if not worst <= (2e-4 if base.dtype == torch.float32 else 0.1) * scale:
            raise ModelError(_cannot(base, f"logits differ by {worst:.2g} from a plain run"))

    def _worst(self, first: list[int], second: list[int], expected: torch.Tensor) -> float:
        """Largest difference to ``expected``, of prefills and of decode steps."""
        rows = RowCache(self.shape, Budget(10**9))
        rows.reserve(2, len(first))
        rows.append()
        rows.append()
        self(rows, [first[:5], second[:4]], [0, 0])
        found = self(rows, [first[5:], second[4:]], [5, 4]).float()
        last = [len(first) - 1, len(second) - 1]
        step = self(rows, [first[last[0] :], second[last[1] :]], last).float()
        worst = torch.stack([found, step]) - expected
        return float(worst.abs().max())  # NaN if any is


def _blocks(lengths: Sequence[int], view: int) -> list[tuple[int, int]]:
    """(first row, tokens to look at), by blocks of rows of which the later ones are the longer."""
    found: list[tuple[int, int]] = []
    last = len(lengths)
    reach = view
    for start in range((last - 1) // BLOCK * BLOCK, 0, -BLOCK):
        before = max(lengths[:start]) + 1
        if (reach - before) * start >= _WORTH:
            found.append((start, reach))
            reach = before
    return [(0, reach), *reversed(found)]


def _padded(
    chunks: Sequence[Sequence[int]], starts: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and positions, each ``[batch][longest chunk]``."""
    longest = max(map(len, chunks))
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    for chunk, start in zip(chunks, starts, strict=True):
        pad = longest - len(chunk)
        end = start + len(chunk)
        ids.append([*chunk, *[chunk[-1]] * pad])
        positions.append([*range(start, end), *[end - 1] * pad])
    return ids, positions


@torch.inference_mode()
def _kv_shape(base: BaseModel) -> KVShape:
    """Ask the model what it caches, by running one token."""
    cache = DynamicCache(config=base.model.config)
    odd = sorted({type(layer).__name__ for layer in cache.layers} - {DynamicLayer.__name__})
    if odd:
        raise ModelError(_cannot(base, f"it has layers without full attention ({', '.join(odd)})"))
    base.model(
        torch.zeros(1, 1, dtype=torch.long, device=base.device),
        past_key_values=cache,
        use_cache=True,
    )
    found = {
        (tuple(keys.shape), tuple(values.shape), keys.dtype)
        for keys, values, *_ in cache
        if keys is not None and values is not None
    }
    if len(found) != 1:
        shapes = ", ".join(sorted(map(str, found))) or "nothing"
        raise ModelError(_cannot(base, f"its layers do not all cache the same shape: {shapes}"))
    ((_, heads, _, key_dim), (_, _, _, value_dim), dtype) = found.pop()
    return KVShape(len(cache.layers), heads, key_dim, value_dim, dtype, base.device)


def _cannot(base: BaseModel, why: str) -> str:
    kind = base.model.config.model_type
    return (
        f"model: the embedded sampler cannot serve {base.name!r} ({kind}): {why}. Use a model with "
        "full attention in every layer (Qwen3, Llama, ...), or sample with vLLM."
    )
