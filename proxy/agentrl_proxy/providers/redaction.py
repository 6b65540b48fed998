"""Remove the secrets of requests to providers from texts that quote them.

Knows where secrets are: keys, the configuration's parameters, URLs, and the environment, in which
LiteLLM finds keys by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from agentrl_proxy.dependencies import ProviderModel

_SHORTEST = 8
_LONGEST_TEXT = 2000
_ENVIRONMENT = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
# Parameters with such a name are secrets whatever they look like, and so are all headers.
_SECRET_NAME = re.compile(r"headers?$|key|token|secret|password|credential|auth|cookie", re.I)
# Words and numbers (model names, versions, regions) are no secrets; errors are about them.
_PLAIN = re.compile(r"[a-z]+([-_ ./:][a-z0-9]+)*|[0-9.-]+")


class Redaction:
    """Replaces the secrets of these models in texts by ``[key]``."""

    def __init__(self, models: Iterable[ProviderModel]) -> None:
        found = set[str]()
        for model in models:
            # LiteLLM looks into the environment even if no model has a key.
            found |= {v for name, v in os.environ.items() if name.upper().endswith(_ENVIRONMENT)}
            url = urlsplit(model.api_base or "")
            found |= {model.api_key or "", url.password or ""}
            found |= {value for _, value in parse_qsl(url.query)}
            found |= set(_in_params(model.params, secret=False))
        long_enough = (text for text in found if len(text) >= _SHORTEST)
        self._secrets = sorted(long_enough, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Return a text without secrets, cut at 2,000 characters."""
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + " ..."


def _in_params(value: object, *, secret: bool) -> Iterator[str]:
    if isinstance(value, str):
        if secret or not _PLAIN.fullmatch(value):
            yield value
        if secret:
            yield from value.split()  # the token alone of ``Bearer <token>``, too
    elif isinstance(value, Mapping):
        for name, one in cast("Mapping[str, Any]", value).items():
            yield from _in_params(one, secret=secret or bool(_SECRET_NAME.search(name)))
    elif isinstance(value, list | tuple):
        for one in cast("Iterable[Any]", value):
            yield from _in_params(one, secret=secret)
