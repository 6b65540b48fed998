"""Turn token ids into text without torch: the vocabularies of the runs' models.

A vocabulary is read from the model's ``tokenizer.json`` where that is on this machine. Other models
load as for training, which takes seconds. Either happens in a thread of its own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl_proxy.rendering.renderer import BYTE_OF
from agentrl_tracer.schemas import Json
from agentrl_trainer import tiny
from agentrl_trainer.names import SMOLLM2, TINY_MODEL, smollm2_folder

_PATIENCE_S = 0.15  # which a page waits for one that loads quickly
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # of vocabularies that fall back to bytes


class Vocabulary:
    """The texts of a model's tokens. Without a tokenizer their ids stand for them: while it loads,
    or because of a ``fault``."""

    def __init__(self, tokenizer: Any = None, fault: str = "") -> None:
        self.fault = fault
        self.is_loading = tokenizer is None and not fault
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in str(getattr(tokenizer, "decoder", ""))
        self._added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        if self._tokenizer is None:
            return f"[{token_id}]".encode()
        token = self._tokenizer.id_to_token(token_id) or ""
        if token_id in self._added:
            return token.encode()
        if self._byte_level:
            return bytes(BYTE_OF[char] for char in token if char in BYTE_OF)
        if byte := _BYTE.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace("\u2581", " ").encode()

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        if self._tokenizer is None:
            return "".join(f" {one}" for one in ids)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def visible(token: bytes) -> str:
    """Return a token as it is shown: ``\\xNN`` for bytes that form no character by themselves,
    ``↵`` for the end of a line, and escapes for what else would move the text around it."""
    text = token.decode("utf-8", "backslashreplace").replace("\n", "↵")
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


class Vocabularies:
    """Those of several models; each is loaded once. Thread-safe."""

    def __init__(self) -> None:
        self._loading = ThreadPoolExecutor(1, "vocabulary")
        self._known: dict[tuple[str, bool], Future[Vocabulary]] = {}

    def of(self, config: Json) -> Vocabulary:
        """Return the vocabulary of the model in a run's configuration."""
        model, tinker = config.get("model") or {}, config.get("tinker") or {}
        name = tinker.get("tokenizer") or model.get("name") or TINY_MODEL
        key = name, bool(model.get("trust_remote_code"))
        # Two threads may both begin: the second load is wasted, and harmless.
        future = self._known.get(key) or self._loading.submit(_load, *key)
        self._known[key] = future
        wait([future], _PATIENCE_S)
        try:
            return future.result() if future.done() else Vocabulary()
        except Exception as error:  # the tokenizers library raises nothing more special
            return Vocabulary(fault=str(error) or type(error).__name__)

    def close(self) -> None:
        self._loading.shutdown(wait=False, cancel_futures=True)


def _load(name: str, trust_remote_code: bool) -> Vocabulary:
    if file := _file(name):
        return Vocabulary(Tokenizer.from_file(file))
    from agentrl_trainer.models.loading import load_facts

    facts: Any = load_facts(name, trust_remote_code=trust_remote_code)
    return Vocabulary(facts.tokenizer.backend_tokenizer)


def _file(name: str) -> str | None:
    """Return the path of a model's ``tokenizer.json``; None if it is not on this machine."""
    from huggingface_hub import try_to_load_from_cache

    built_in = {TINY_MODEL: tiny.MODEL_DIR, SMOLLM2: smollm2_folder()}
    file = built_in.get(name, Path(name).expanduser()) / "tokenizer.json"
    if file.is_file():
        return str(file)
    with contextlib.suppress(ValueError):  # a path is no name of the hub's
        cached = try_to_load_from_cache(name, "tokenizer.json")
        return cached if isinstance(cached, str) else None
    return None
