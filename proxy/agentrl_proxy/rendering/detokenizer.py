"""Decode token ids as they arrive: whole characters only, and never past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
# An unfinished UTF-8 character has at most three bytes, and so at most three tokens.
_UNFINISHED_TOKENS = 3


class Detokenizer:
    """Decodes one choice. The pieces from ``push`` and ``finish`` add up to the answer's text.

    Args:
        decode: ids to text.
        stop: strings that end the answer; the text is cut before the first of them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._ids: list[int] = []
        self._context = 0  # decoding starts here, so that a word's leading space is kept
        self._done = 0  # ids before this are in the text
        self._held = ""  # decoded text that may begin a stop string
        self._stopped = False

    def push(self, token_id: int) -> str:
        """Take a token; return the text that is now certain, often empty."""
        self._ids.append(token_id)
        new = self._decoded(final=False)
        return self._release(new, final=False) if self._stop else new

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._release(self._decoded(final=True), final=True)

    def _decoded(self, *, final: bool) -> str:
        end = len(self._ids)
        if self._done == end:
            return ""
        known = self._decode(self._ids[self._context : self._done])
        text = self._decode(self._ids[self._context :])
        if not final and text.endswith(_REPLACEMENT):
            # Wait for the rest of the character, unless the bytes cannot become one.
            if end - self._done <= _UNFINISHED_TOKENS:
                return ""
            end -= _UNFINISHED_TOKENS
            text = self._decode(self._ids[self._context : end])
        new = text[len(known) :]
        self._context, self._done = self._done, end
        return new

    def _release(self, new: str, *, final: bool) -> str:
        if self._stopped:
            return ""
        if not self._stop:
            return new
        text = self._held + new
        cut = _cut(text, self._stop)
        if cut != text:
            self._stopped = True
            return cut
        held_from = len(text) if final else max(len(text) - self._longest_stop + 1, 0)
        while not any(stop.startswith(text[held_from:]) for stop in self._stop):
            held_from += 1  # "" begins each stop string
        self._held = text[held_from:]
        return text[:held_from]


def _cut(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=None)]


def whole_text(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], stop: Sequence[str]
) -> str:
    """Return the text that a Detokenizer gives for these ids."""
    text = decode(ids)
    if _REPLACEMENT in text:  # the number of marks for invalid bytes depends on the pieces
        tokens = Detokenizer(decode, stop)
        return "".join([*(tokens.push(i) for i in ids), tokens.finish()])
    return _cut(text, stop)
