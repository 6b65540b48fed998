"""Stop strings: decode the answer token by token and look for them in the newest text.

Knows: a tokenizer. Does not know: torch, requests, caches.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class StopWatch:
    """Watches one sequence. Special tokens are decoded too: a stop string may be one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._keep = max(len(s) for s in stop) - 1
        self._tail = ""
        """The last characters, too few to hold a stop string by themselves."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        backend = getattr(tokenizer, "_tokenizer", None)
        self._backend = backend if isinstance(backend, Tokenizer) else None
        self._stream = DecodeStream(skip_special_tokens=False)
        self._seen = 0

    def push(self, token_id: int) -> str | None:
        """Add a token; the stop string the text now contains (the earliest one), if any."""
        text = self._tail + self._decode(token_id)
        hits = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        self._tail = text[-self._keep :] if self._keep else ""
        return min(hits)[1] if hits else None

    def _decode(self, token_id: int) -> str:
        """The text this token adds; empty while a character is incomplete."""
        if self._backend is not None:
            return self._stream.step(self._backend, token_id) or ""
        # Tokenizers written in Python cannot stream: decode everything again, O(n) a token.
        self._ids.append(token_id)
        text = str(self._tokenizer.decode(self._ids))
        if text.endswith("�"):
            return ""
        new, self._seen = text[self._seen :], len(text)
        return new
