"""The agent under training, and how the agents (roles) of its requests are known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from agentrl.config.field_types import Pattern, Table, from_json


class AgentSettings(Table):
    """The agent under training."""

    entrypoint: Annotated[str, Field(min_length=1)]
    """What to run: module:function, file.py:function, or a command."""
    python: str | None = None
    """Interpreter that runs the agent, of another environment. It needs agentrl's base install."""
    user: str | None = None
    """User whose processes the agents are; only root can give it. They can then neither read nor
    write what the run has."""
    sandbox: bool = False
    """Run each agent process in bubblewrap. It sees a read-only file system without the run's
    folder and store, a /tmp and a home folder of its own, and no other processes. Each process
    starts a fresh interpreter, which takes longer than a fork."""
    harbor_agent: str = "claude-code"
    """Harbor's agent of harbor:PATH, by its name or module:Class."""
    harbor_environment: str = "docker"
    """Where Harbor's trials run: one of its environments, or module:Class."""
    harbor_command: str = "harbor"
    """Program of Harbor, which has an environment of its own."""
    harbor_host: str | None = None
    """Name under which Harbor's environments reach this machine, such as host.docker.internal."""


class TrainAgentSettings(AgentSettings):
    tasks: Path
    """Tasks to train on: a file, a dataset, or a generator. A file is JSON lines,
    JSON, CSV or Parquet; a dataset is Hugging Face's, NAME or NAME:SPLIT; a generator is
    module:function of a seed. With harbor:PATH as the agent, PATH, a folder of Harbor's tasks, is
    the default."""

    @model_validator(mode="before")
    @classmethod
    def _take_tasks_of_harbor(cls, given: Any) -> Any:
        """Take the tasks from ``harbor:PATH``, unless they are given."""
        if isinstance(given, dict) and str(given.get("entrypoint", "")).startswith("harbor:"):
            return {"tasks": given["entrypoint"].removeprefix("harbor:")} | given
        return given


class RunAgentSettings(AgentSettings):
    task: Annotated[dict[str, Any], BeforeValidator(from_json)]
    """The task: a JSON object, passed to the agent unchanged."""


class SpeakerSettings(Table):
    """How the requests of an agent (role) are known. Each pattern is a regular expression that must
    be found; without any, every request fits."""

    system: Pattern | None = None
    """In the system prompt."""
    last: Pattern | None = None
    """In the last message."""
    model: Pattern | None = None
    """In the requested model's name."""
    headers: dict[str, Pattern] = Field(default_factory=dict[str, str])
    """In each of these headers."""
    tools: bool | None = None
    """Whether the request has tools."""


Speakers = Annotated[dict[str, SpeakerSettings], BeforeValidator(from_json)]
