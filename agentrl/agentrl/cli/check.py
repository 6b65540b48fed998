"""``agentrl check``: try an agent and its tasks before a training, and say what to expect."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.text import Text

from agentrl.capacity import choose_runners
from agentrl.check.agents_memory import AgentsMemory
from agentrl.cli import Tokens
from agentrl.cli.fixed_model import fixed_model
from agentrl.cli.tasks import training_tasks
from agentrl.config.commands import CheckConfig
from agentrl.config.loading import load, steps_of
from agentrl.console.output import console, print_block, print_line, print_sentences
from agentrl.console.tables import facts
from agentrl.console.trace_tree import rollout_trace
from agentrl.findings import WHERE_THE_MODEL_IS, Finding
from agentrl.runner.agent_spec import validate_agent
from agentrl.scoring.functions import load_functions
from agentrl.supervisor import SupervisedProcess
from agentrl.training.evaluation import plan_evaluation
from agentrl.training.metrics import count_failures
from agentrl.training.queue.curriculum import tasks_in_order
from agentrl_tracer.schemas import NewRollout, RolloutState
from agentrl_trainer.data.rewards import rollout_rewards

_NOT_LOADED = re.compile(r"\b(ImportError|ModuleNotFoundError|SyntaxError|AgentSpecError)\b")


def check_command(*tokens: Tokens) -> None:
    """Try an agent and its tasks before a training: what works, what fits, what to expect.

    Takes the settings of `agentrl train`. Runs the first task with the base model and prints its
    trace, then --samples rollouts of a few tasks. Prints what a training would meet: chat template,
    calls, tokens, memory, time, success, and in the end whether there is something to learn.
    Nothing is trained, and --name stays free for the training. The exit code is 1 if nothing could
    be trained.
    """
    config = load(CheckConfig, tokens)
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    functions = load_functions(config.rewards)
    tasks = training_tasks(config)
    how, count = config.rollouts, min(config.check.tasks, len(tasks))
    if why := choose_runners(config, how.batch_size * how.group_size):
        print_sentences(why, "dim")
    drawn = tasks_in_order(0, count, len(tasks), config.run.seed)
    tried = [tasks[0], *(tasks[at] for at in drawn)]
    with fixed_model(config, "check", tried, rewards=functions) as made:
        store, folder = made.session.store, made.session.folder
        [first] = made.execute(_planned(config, made.task_ids[:1], 1))
        print_block(rollout_trace(store, first))
        works = first.state is RolloutState.SUCCEEDED
        planned = _planned(config, made.task_ids[1:], config.check.samples)
        pool = made.session.pool
        with AgentsMemory(
            lambda: pool.pid if isinstance(pool, SupervisedProcess) else None
        ) as held:
            rollouts = made.execute(planned) if works else [first]
    ids = [rollout.id for rollout in rollouts]
    rewards, calls = rollout_rewards(rollouts, store.rewards(ids)), store.calls(rollout_ids=ids)
    store.close()
    if works:
        with console.status("measuring an update"):
            from agentrl.check.report import findings

            steps = steps_of(config, tasks)
            found, verdict = findings(config, steps, rollouts, calls, rewards, held)
    else:
        [why] = count_failures(rollouts)
        silent = not calls and not _NOT_LOADED.search(why)  # else it was not even imported
        fix = f"it did not reach the model: {WHERE_THE_MODEL_IS}" if silent else ""
        found, verdict = {}, Finding(f"the first rollout failed: {why}", fix, stops=True)
    lines = {name: [*map(asdict, some)] for name, some in found.items()}
    folder.write_json(folder.summary, {"verdict": asdict(verdict), **lines})
    print_line()
    print_block(facts((name, Text("\n").join(map(_shown, some))) for name, some in found.items()))
    print_line((f"recorded in {folder.root}", "dim"))
    color = "red" if verdict.stops else "yellow" if verdict.fix else "green"
    print_sentences(str(verdict), f"bold {color}")
    sys.exit(verdict.stops)


def _shown(finding: Finding) -> Text:
    return Text.assemble(finding.fact, (f"\n→ {finding.fix}" if finding.fix else "", "yellow"))


def _planned(config: CheckConfig, task_ids: Sequence[str], samples: int) -> list[NewRollout]:
    """Plan rollouts that sample as those of a training do."""
    how = config.evaluation.model_copy(update={"samples": samples})
    planned = plan_evaluation(task_ids, 0, how, config.run.seed)
    return [replace(rollout, sampling={}) for rollout in planned]
