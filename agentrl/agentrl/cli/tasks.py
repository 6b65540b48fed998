"""Read the tasks that a command names, and check those with tests before anything starts."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.config.field_types import is_generator
from agentrl.config.settings.agent import AgentSettings
from agentrl.console.output import print_sentences
from agentrl.datasets.files import load_tasks
from agentrl.runner.agent_spec import parse_agent, unknown_placeholders
from agentrl.runner.coding_tasks.harbor import harbor_tasks
from agentrl.runner.coding_tasks.sandbox import check_bubblewrap
from agentrl.runner.coding_tasks.task import is_coding_task, parse_task
from agentrl.runner.protocol import HARBOR
from agentrl.runs.folder import RunFolder
from agentrl.training.resume import tasks_kept
from agentrl.training.setup.own_functions import generated_tasks
from agentrl_tracer.schemas import Json


def training_tasks(config: TrainConfig, resumed: RunFolder | None = None) -> list[Json]:
    """Return the tasks of a training: those of its file, or what its generator yields for its seed.

    A generator is asked for as many tasks as the run's steps take, or took before it is resumed.

    Raises:
        ConfigError: as ``read_tasks``, or a generator without ``run.steps``.
    """
    source = str(config.agent.tasks)
    if not is_generator(source):
        return read_tasks(config.agent.tasks, "agent.tasks", config.agent)
    if config.run.steps is None:
        raise ConfigError(f"run.steps: is missing; {source} may yield tasks without end")
    count = config.run.steps * config.rollouts.batch_size
    count = max(count, tasks_kept(resumed) if resumed else 0)
    return generated_tasks(source, count, config.run.seed)


def read_tasks(path: Path, field: str, agent: AgentSettings) -> list[Json]:
    """Return the tasks in a file, or Harbor's in a folder.

    Raises:
        ConfigError: the file cannot be read, or a task with tests cannot be run.
    """
    if agent.entrypoint.startswith(HARBOR):
        try:
            settings = ("agent", "environment", "command", "host")
            return harbor_tasks(path, {one: getattr(agent, f"harbor_{one}") for one in settings})
        except ValueError as error:
            raise ConfigError(f"{field}: {error}") from error
    tasks = load_tasks(path, field)
    if parse_agent(agent.entrypoint).kind != "command":
        return tasks
    plain = [task for task in tasks if not is_coding_task(task)]
    for name in unknown_placeholders(agent.entrypoint, plain) if plain else []:
        print_sentences(
            f"note: agent.entrypoint: no task has a field {name!r}, so {{{name}}} is passed as it "
            f"is (fields: {', '.join(sorted(set().union(*plain)))})"
        )
    where, sandboxed = f"{field}: {path}", False
    for number, task in enumerate(tasks, start=1):
        try:
            sandboxed |= is_coding_task(task) and parse_task(task).sandbox
        except ValueError as error:
            raise ConfigError(f"{where}, task {number}: {error}") from error
    if sandboxed:
        try:
            check_bubblewrap()
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    return tasks
