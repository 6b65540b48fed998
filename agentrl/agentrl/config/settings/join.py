"""More runners for a run in progress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from agentrl.config.field_types import Count, HttpUrl, Positive, Store, Table, from_names


class JoinAgentSettings(Table):
    entrypoint: str | None = None
    """What to run; by default the run's agent."""
    python: str | None = None
    """Interpreter that runs the agent, of another environment."""
    user: str | None = None
    """User whose processes the agents are; by default the run's."""
    sandbox: bool | None = None
    """Run each agent process in bubblewrap; by default as the run does."""


class JoinRolloutSettings(Table):
    runners: Annotated[int, Field(ge=1, le=1024)] = 8
    """Worker processes that run the agent."""
    timeout: Positive | None = None
    """Seconds after which an attempt is killed; by default the run's."""
    concurrency: Count | None = None
    """Rollouts of an async agent in one process; by default the run's."""


class JoinGatewaySettings(Table):
    url: Annotated[list[HttpUrl], BeforeValidator(from_names)] = Field(default_factory=list[str])
    """URL of the run's gateway, as this machine reaches it, or URLs of several; by default those
    that the run keeps in its store."""


class JoinRunSettings(Table):
    store: Store
    """The run's store: a PostgreSQL URL, or on the same machine its file."""
    id: str | None = None
    """Id or name of the run; by default the newest one in progress."""
    logs: Path = Path("runner-logs")
    """Folder for the logs of this machine's runners."""
