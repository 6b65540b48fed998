"""Secrets that a configuration names and does not hold: variables of the environment hold them.

Knows how a text names one (``os.environ/NAME``, as LiteLLM's own configuration does, anywhere in a
text: ``Bearer os.environ/TEAM_TOKEN``) and which settings can only be secrets. Does not know what
they are for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

_NAMED = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)")
_HEADERS = re.compile(r"headers?$")
# Under a name that ends like this there is a secret. (``max_tokens`` is none, nor is
# ``prompt_cache_key``: a key is one in a header only.)
_SECRET = re.compile(
    r"(authorization|cookie|password|secret|credentials?|[-_]token|^token|api[-_]?key|"
    r"secret[-_]access[-_]key)$"
)
_SECRET_HEADER = re.compile(rf"{_SECRET.pattern}|[-_]?key$")


def check_variable(name: str) -> str:
    """Return the name of an environment variable that is set.

    Raises:
        ValueError: it is not set, or empty.
    """
    if not os.environ.get(name):
        raise ValueError(f"the environment variable {name} is not set")
    return name


def check_params(params: dict[str, Any]) -> dict[str, Any]:
    """Return LiteLLM parameters that hold no secret and name only variables that are set.

    Raises:
        ValueError: names the parameter and the fix.
    """
    for name in params:
        if name in ("model", "api_base", "api_key_env", "timeout", "num_retries", "fallbacks"):
            raise ValueError(f"{name} belongs beside params, not into it")
        if name == "api_key":
            raise ValueError("a key must not be in the file: name its variable in api_key_env")
    if where := written_out(params):
        raise ValueError(
            f"{where} is a secret, which must not be in the file: write os.environ/NAME in its "
            "place, where NAME is the environment variable that holds it"
        )
    for name in variables_in(params):
        check_variable(name)
    return params


def variables_in(settings: object) -> list[str]:
    """The variables that settings name, in their order."""
    return [
        name
        for _, text in _texts(settings)
        for name in _NAMED.findall(text)  # a name may be there twice
    ]


def filled(settings: Any, environment: Mapping[str, str]) -> Any:
    """Settings with the values of what they name."""
    if isinstance(settings, str):
        return _NAMED.sub(lambda found: environment[found[1]], settings)
    if isinstance(settings, dict):
        items = cast("dict[str, Any]", settings).items()
        return {key: filled(value, environment) for key, value in items}
    if isinstance(settings, list):
        return [filled(value, environment) for value in cast("list[Any]", settings)]
    return settings


def written_out(settings: object) -> str | None:
    """Where in settings a secret is written out, if it is: ``extra_headers.authorization``."""
    for path, text in _texts(settings):
        secret = _SECRET_HEADER if any(map(_HEADERS.search, path[:-1])) else _SECRET
        if path and secret.search(path[-1].lower()) and text and not _NAMED.search(text):
            return ".".join(path)
    return None


def _texts(settings: object, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text, and the names that lead to it. A list's texts are under the list's name."""
    if isinstance(settings, str):
        yield path, settings
    elif isinstance(settings, dict):
        for key, value in cast("dict[object, object]", settings).items():
            yield from _texts(value, *path, str(key))
    elif isinstance(settings, list):
        for value in cast("list[object]", settings):
            yield from _texts(value, *path)
