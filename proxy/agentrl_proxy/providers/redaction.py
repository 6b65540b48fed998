"""What must not be quoted: the secrets that requests to somebody else's models carry.

Knows where there are secrets: keys, the parameters of the configuration, URLs, the environment (in
which LiteLLM finds keys by itself). Does not know who would quote them, or where.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from agentrl_proxy.dependencies import ProviderModel

_SHORTEST = 8
_ENVIRONMENT = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
# Parameters under such a name are secrets whatever they look like: all headers are, too.
_SECRET_NAME = re.compile(r"headers?$|key|token|secret|password|credential|auth|cookie", re.I)
# Words and numbers (model names, versions, regions): what an error is about, and no secret.
_PLAIN = re.compile(r"[a-z]+([-_ ./:][a-z0-9]+)*|[0-9.-]+")


class Redaction:
    """Takes secrets out of texts."""

    def __init__(self, models: Iterable[ProviderModel]) -> None:
        models = list(models)
        found = {text for one in models for text in _of(one)}
        if models:  # also where none has a key of its own: LiteLLM finds one there
            found |= {v for name, v in os.environ.items() if name.upper().endswith(_ENVIRONMENT)}
        long_enough = (text for text in found if len(text) >= _SHORTEST)
        self._secrets = sorted(long_enough, key=len, reverse=True)

    def clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        return text


def _of(model: ProviderModel) -> Iterator[str]:
    if model.api_key:
        yield model.api_key
    if model.api_base:
        url = urlsplit(model.api_base)
        if url.password:
            yield url.password
        yield from (value for _, value in parse_qsl(url.query))
    yield from _in_params(model.params, secret=False)


def _in_params(value: object, *, secret: bool) -> Iterator[str]:
    if isinstance(value, str):
        if secret or not _PLAIN.fullmatch(value):
            yield value
        if secret:
            yield from value.split()  # ``Bearer <token>``: the token alone, too
    elif isinstance(value, Mapping):
        for name, one in cast("Mapping[str, Any]", value).items():
            yield from _in_params(one, secret=secret or bool(_SECRET_NAME.search(name)))
    elif isinstance(value, list | tuple):
        for one in cast("Iterable[Any]", value):
            yield from _in_params(one, secret=secret)
