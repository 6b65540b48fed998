"""One forward of the model over rows, and the check which way of doing so this model allows.

Knows: transformers models, attention. Does not know: requests, sampling, adapters.

There are several ways, quickest first, and the first that computes what the model itself does is
taken. Which model allows which is found out by trying rather than by knowing the families.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedConfig,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl_trainer.inference.kv_cache import TIME_STEP, Budget, KVShape, RowCache, Rows
from agentrl_trainer.inference.llama_cpu import LeanDecoder
from agentrl_trainer.inference.recurrent_cache import FIXED, Past, State, StateRows, advance
from agentrl_trainer.models.loading import BaseModel, ModelError
from agentrl_trainer.models.prefix_attention import additive, explicit
from agentrl_trainer.models.shrink_windows import shrunk_windows

log = logging.getLogger(__name__)

ATTENTION = "agentrl_rows"
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
    cap, sinks = cast(Any, kwargs.get("softcap")), cast(Any, kwargs.get("s_aux"))
    if cap is not None or sinks is not None:
        adds = additive(attention_mask, query)
        out = explicit(query, key, value, adds, scaling, cap, sinks)
        return out.transpose(1, 2), None
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


_positions: ContextVar[torch.Tensor | None] = ContextVar("positions", default=None)
"""``[batch, new]`` of the tokens which a forward over a RowCache computes."""


@contextmanager
def _at(positions: torch.Tensor | None) -> Iterator[None]:
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


def _mask_by_rule(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Callable[..., torch.Tensor],
    device: torch.device,
    **kwargs: Any,
) -> torch.Tensor | None:
    """``[batch, 1, new, view]``: the model's own rule (a window, say) at each row's positions.

    transformers hands the rule over with the attention's kind; it knows one position for all rows.
    """
    positions = _positions.get()
    if positions is None:
        return sdpa_mask(
            batch_size, q_length, kv_length, *args,
            mask_function=mask_function, device=device, **kwargs,
        )  # fmt: skip
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    heads = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    keys = torch.arange(kv_length, device=device)[None, None, None]
    seen = mask_function(rows, heads, positions[:, None, :, None], keys)
    return seen.expand(batch_size, 1, q_length, kv_length)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask_by_rule)


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
        self._additive = False
        self._by_rule = False
        self.past: Past | None = None
        """None: rows are one rectangle, computed together; else what a row's own cache is."""
        self.lean: LeanDecoder | None = None
        self.why_not_lean: str | None = None
        """Why ``lean`` is not used although it was wanted."""
        self._run = torch.empty(0)
        accepted = inspect.signature(type(base.model).forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._choose(base, lean)

    @property
    def how(self) -> str:
        """In a few words, for people."""
        if self.lean is not None:
            return "lean"
        if self.past is None:
            return "together"
        return "one by one, anew" if self.past is Past.NONE else "one by one"

    def new_rows(self, budget: Budget) -> Rows:
        return RowCache(self.shape, budget) if self.past is None else StateRows(budget)

    def __call__(
        self, rows: Rows, chunks: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> torch.Tensor:
        """Logits ``[batch, vocab]`` after the last token of each chunk.

        Row i of ``rows``, which ``new_rows`` made, holds ``starts[i]`` tokens and gets
        ``chunks[i]`` on top.
        """
        if self.past is None:
            return self._together(cast(RowCache, rows), chunks, starts)
        states = cast(StateRows, rows).states
        assert [len(state) for state in states[: len(chunks)]] == [*starts]
        return torch.stack(
            [
                advance(self.model, state, [*chunk], self.past, self._options)
                for state, chunk in zip(states, chunks, strict=False)
            ]
        )

    def _together(
        self, rows: RowCache, chunks: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> torch.Tensor:
        """Shorter chunks are padded by *repeating their last token at its own position*: it
        overwrites itself with the same keys, and the last column holds every row's last token.
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
        mask = None if self._by_rule else self._mask(positions, view)
        if self.lean is not None and mask is not None:
            blocks = _blocks(starts, view) if token_ids.shape[1] == 1 else []
            return self.lean(rows, token_ids, positions, mask, end, blocks)
        with _at(positions):
            out = self.model(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=rows,
                use_cache=True,
                **self._options,
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
    def _choose(self, base: BaseModel, lean: bool) -> None:
        """Take the first way that computes what a plain forward does."""
        why: list[str] = []
        original = cast(str, base.model.config._attn_implementation)
        with shrunk_windows(base.model):
            rows = _probes(self.vocab)
            plain = [_plain(base.model, row) for row in rows]
            for way in (self._try_lean if lean else None, *self._pages(), *self._states()):
                if way is None:
                    continue
                if base.model.config._attn_implementation != original:
                    base.model.set_attn_implementation(original)
                self._additive = self._by_rule = False
                self.past, self.lean, self._run = None, None, torch.empty(0)
                try:
                    way(base)
                    worst = self._worst(rows, plain)
                except Exception as error:  # whatever a model's own code may raise
                    why.append(f"{self.how}: {type(error).__name__}: {error}")
                    if way == self._try_lean:
                        self.why_not_lean = str(error)
                    continue
                scale = max(1.0, *(float(logits.abs().max()) for logits in plain))
                exact = 1e-4 if self.lean is not None else 2e-4
                if worst <= (exact if base.dtype == torch.float32 else 0.1) * scale:
                    break
                why.append(f"{self.how}: logits differ by {worst:.2g} from a plain run")
                if way == self._try_lean:
                    self.why_not_lean = f"its logits differ by {worst:.2g}"
            else:
                raise ModelError(_cannot(base, "; ".join(why)))
        self._run = torch.empty(0)
        if self.past is not None:
            self.shape = _state_shape(base, self.past, self._options)
            log.warning(
                "model: the embedded sampler computes rows of %s (%s) %s, which is slow: with a "
                "GPU, sample with vLLM (sampler: vllm).",
                base.name, base.model.config.model_type, self.how,
            )  # fmt: skip
        for line in why:
            log.debug("%s is not sampled from %s", base.name, line)

    def _try_lean(self, base: BaseModel) -> None:
        self.shape = _kv_shape(base, (DynamicLayer,))
        base.model.set_attn_implementation(ATTENTION)
        self.lean = LeanDecoder(base.model)

    def _pages(self) -> Iterator[Callable[[BaseModel], None]]:
        """Rows together: masks as we know them, or (only so are there windows) as the model."""

        def take(base: BaseModel, by_rule: bool, attention: str) -> None:
            layers = (DynamicLayer, DynamicSlidingWindowLayer) if by_rule else (DynamicLayer,)
            self.shape = _kv_shape(base, layers)
            base.model.set_attn_implementation(attention)
            self._by_rule, self._additive = by_rule, attention == "eager"

        if getattr(self.model, "_supports_sdpa", False):
            yield lambda base: take(base, False, ATTENTION)
        else:
            yield lambda base: take(base, False, "eager")
        yield lambda base: take(base, True, ATTENTION)

    def _states(self) -> Iterator[Callable[[BaseModel], None]]:
        for past in Past:

            def take(base: BaseModel, past: Past = past) -> None:
                if past is Past.CHUNKS and base.dtype != torch.float32 and _recurs(base):
                    raise ValueError("rounding could hide that it forgets its state")
                self.past = past

            yield take

    def _worst(self, tokens: Sequence[list[int]], expected: Sequence[torch.Tensor]) -> float:
        """Largest difference to ``expected`` after each of several chunks of unlike lengths."""
        rows = self.new_rows(Budget(10**9))
        rows.reserve(len(tokens), max(map(len, tokens)))
        for _ in tokens:
            rows.append()
        worst = torch.zeros((), device=self.device)
        done = [0] * len(tokens)
        for sizes in zip(*_CHUNKS, strict=True):
            chunks = [t[at : at + n] for t, at, n in zip(tokens, done, sizes, strict=True)]
            logits = self(rows, chunks, done).float()
            done = [at + n for at, n in zip(done, sizes, strict=True)]
            for found, plain, at in zip(logits, expected, done, strict=True):
                worst = torch.maximum(worst, (found - plain[at - 1]).abs().max())
        return float(worst)  # NaN if any is


_CHUNKS = ((16, 2, 1, 4, 1), (9, 3, 1, 1, 3))
"""How two rows are fed. Some models forget their state when they get several tokens on top of it,
which shows best directly behind them; and they are longer than shrunk windows."""


def _probes(vocab: int) -> list[list[int]]:
    tokens = [(i * 7919 + 13) % vocab for i in range(30)]
    return [tokens[: sum(_CHUNKS[0])], tokens[3 : 3 + sum(_CHUNKS[1])]]


def _recurs(base: BaseModel) -> bool:
    """Whether some layer's past is no run of keys."""
    layers = DynamicCache(config=base.model.config).layers
    return any(not isinstance(layer, DynamicLayer) for layer in layers)


def _plain(model: Any, row: list[int]) -> torch.Tensor:
    ids = torch.tensor([row], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0].float()


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


def _kv_shape(base: BaseModel, allowed: tuple[type, ...]) -> KVShape:
    """Ask the model what it caches, by running one token."""
    cache = DynamicCache(config=base.model.config)
    odd = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in allowed})
    if odd:
        raise ValueError(f"it has layers of {', '.join(odd)}")
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
        raise ValueError(f"its layers do not all cache the same shape: {shapes}")
    ((_, heads, _, key_dim), (_, _, _, value_dim), dtype) = found.pop()
    return KVShape(len(cache.layers), heads, key_dim, value_dim, dtype, base.device)


def _state_shape(base: BaseModel, past: Past, options: dict[str, Any]) -> KVShape:
    """What a token of a row costs in memory, as if it were keys: a state spread over ``FIXED``."""
    state = State()
    with torch.inference_mode():
        sizes: list[int] = []
        for _ in range(2):
            advance(base.model, state, [0] * 16, past, options)
            sizes.append(_bytes(state.cache))
    each = max(0, sizes[1] - sizes[0]) // 16
    fixed = max(0, sizes[1] - 32 * each)
    elements = max(1, (each + -(-fixed // FIXED)) // base.dtype.itemsize)
    return KVShape(1, 1, elements, 0, base.dtype, base.device)


def _bytes(held: Any) -> int:
    """Of all tensors in a cache, whatever its class."""
    if isinstance(held, torch.Tensor):
        return held.numel() * held.element_size()
    if isinstance(held, dict):
        return sum(_bytes(x) for x in cast(dict[Any, Any], held).values())
    if isinstance(held, (list, tuple)):
        return sum(_bytes(x) for x in cast(Sequence[Any], held))
    ours = type(held).__module__.startswith("transformers.") and hasattr(held, "__dict__")
    return _bytes(vars(held)) if ours and not isinstance(held, PreTrainedConfig) else 0


def _cannot(base: BaseModel, why: str) -> str:
    kind = base.model.config.model_type
    return (
        f"model: the embedded sampler cannot serve {base.name!r} ({kind}). Sample with vLLM "
        f"(sampler: vllm), or use another model. It was tried {why}."
    )
