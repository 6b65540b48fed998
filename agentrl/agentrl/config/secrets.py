"""Secrets that a configuration names and does not hold: variables of the environment hold them.

A text names one by ``os.environ/NAME``, anywhere in it, as in LiteLLM's own configuration:
``Bearer os.environ/TEAM_TOKEN``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

FORWARD_HEADERS = "AGENTRL_FORWARD_OTLP_HEADERS"
STORE_PASSWORD = "AGENTRL_STORE_PASSWORD"
"""Stands in a run's records for a password that was written into the store's URL."""
_ALWAYS = (
    FORWARD_HEADERS,
    STORE_PASSWORD,
    "AGENTRL_RUN__STORE",
    "AGENTRL_GATEWAY__OPERATOR_KEY",
    "AGENTRL_TINKER_SERVER_KEY",
    "PGPASSWORD",
    "TINKER_API_KEY",
)
_OF_TRACKERS = {
    "wandb": ("WANDB_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
}
_NAMED = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)")
# Under a name that ends like this there is a secret. (``max_tokens`` is none, nor is
# ``prompt_cache_key``: a key is one in a header only.)
_SECRET = re.compile(
    r"(authorization|cookie|password|secret|credentials?|[-_]token|^token|api[-_]?key|"
    r"secret[-_]access[-_]key)$"
)
_PASSWORD = re.compile(r"(?<=://)([^:/?#]*:)([^@]+)(?=@)|([?&]\w*password=)([^&]+)")
_USER = re.compile(r"://[^/?#]*@|[?&]([^=&]*)=")
_SECRET_HEADER = re.compile(rf"{_SECRET.pattern}|[-_]?key$")


class MissingSecretError(RuntimeError):
    """A run's records name an environment variable that is not set."""


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
    for path, text in _texts(params):
        in_header = any(name.endswith(("header", "headers")) for name in path[:-1])
        secret = (_SECRET_HEADER if in_header else _SECRET).search(path[-1].lower())
        if secret and text and not _NAMED.search(text):
            raise ValueError(
                f"{'.'.join(path)} is a secret, which must not be in the file: write "
                "os.environ/NAME in its place, where NAME is the environment variable that holds it"
            )
    for name in variables_in(params):
        check_variable(name)
    return params


def variables_in(settings: object) -> list[str]:
    """Return the variables that settings name, in their order."""
    return [name for _, text in _texts(settings) for name in _NAMED.findall(text)]


def filled(settings: Any, environment: Mapping[str, str]) -> Any:
    """Return settings with the values of the variables that they name."""
    if isinstance(settings, str):
        return _NAMED.sub(lambda found: environment[found[1]], settings)
    if isinstance(settings, dict):
        return {key: filled(value, environment) for key, value in settings.items()}
    if isinstance(settings, list):
        return [filled(value, environment) for value in settings]
    return settings


# ---- URLs


def check_url(url: str) -> str:
    """Return a URL without user or key in it, because a run records its URLs.

    Raises:
        ValueError: it has one.
    """
    for found in _USER.finditer(url):
        if found[1] is None or _SECRET_HEADER.search(found[1].lower()):
            raise ValueError(
                "a user, password or key must not be in a URL, which runs record; give it in the "
                "variable or header that the documentation of this setting names"
            )
    return url


def check_store(url: str) -> str:
    """Return a store's URL or path, which names only variables that are set.

    Raises:
        ValueError: one is not set.
    """
    for name in variables_in(url):
        try:
            check_variable(name)
        except ValueError as error:
            raise ValueError(f"{error}: it holds the store's password") from None
    return url


def passwords_in(text: str) -> list[str]:
    """Return the passwords in a text's URLs."""
    return [found[2] or found[4] for found in _PASSWORD.finditer(text)]


def without_password(store: str) -> str:
    """Return a store's URL as it may be recorded: a reference stands for its password."""
    return _PASSWORD.sub(
        lambda found: (
            found[0]
            if _NAMED.search(found[0])
            else f"{found[1] or found[3]}os.environ/{STORE_PASSWORD}"
        ),
        store,
    )


def without_variables(store: str) -> str:
    """Return a recorded store's URL without its password, to compare it with another."""
    return _NAMED.sub("", store)


def store_url(store: str) -> str:
    """Return a store's URL with the values of the variables that it names.

    Raises:
        MissingSecretError: one is not set.
    """
    try:
        check_store(store)
    except ValueError as error:
        raise MissingSecretError(f"run.store: {error}; set it") from None
    if _NAMED.fullmatch(store):
        return filled(store, os.environ)
    return _NAMED.sub(lambda found: quote(os.environ[found[1]], safe=""), store)


def as_recorded(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a command's settings as a run records them: without the store's password."""
    run = settings.get("run", {})
    if not run.get("store"):
        return settings
    return settings | {"run": run | {"store": without_password(run["store"])}}


# ---- variables


def secret_variables(settings: Any) -> list[str]:
    """Return the names of the environment variables that agents and vLLM must not inherit.

    Args:
        settings: a command's, a gateway's plan, or what a run has recorded of them.
    """
    recorded = settings if isinstance(settings, dict) else settings.model_dump(mode="json")
    run, vllm = (recorded.get("run") or {}), (recorded.get("sampler") or {}).get("vllm") or {}
    names = [*_ALWAYS, vllm.get("key_env"), *variables_in(run)]
    for one in (recorded.get("models") or {}).values():
        names += [one.get("api_key_env"), *variables_in(one.get("params"))]
    for tracker in run.get("trackers") or []:
        names += _OF_TRACKERS.get(tracker, ())
    return [*filter(None, names)]


def _texts(settings: object, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each text and the names that lead to it; a list's texts are under the list's name."""
    if isinstance(settings, str):
        yield path, settings
    elif isinstance(settings, dict):
        for key, value in settings.items():
            yield from _texts(value, *path, str(key))
    elif isinstance(settings, list):
        for value in settings:
            yield from _texts(value, *path)
