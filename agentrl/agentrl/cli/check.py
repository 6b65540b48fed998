"""``agentrl check``: try an agent and its tasks before a training, and say what to expect."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.text import Text

from agentrl.capacity import choose_runners
from agentrl.cli import Tokens
from agentrl.cli.eval import Scores, score
from agentrl.cli.fixed_model import fixed_model
from agentrl.config.commands import CheckConfig
from agentrl.config.loading import load, load_tasks, steps_of
from agentrl.console.output import console, print_block, print_line
from agentrl.console.report import facts
from agentrl.console.trace_tree import rollout_trace
from agentrl.findings import Finding
from agentrl.runner.agent_spec import validate_agent
from agentrl.training.metrics import count_failures
from agentrl.training.rollout_queue import rollout_seed, tasks_in_order
from agentrl_tracer.schemas import NewRollout, Purpose, Rollout, RolloutState
from agentrl_trainer.data.rewards import rollout_rewards


def check_command(*tokens: Tokens) -> None:
    """Try an agent and its tasks before a training: what works, what fits, what to expect.

    Takes the settings of `agentrl train`. Runs the first task with the base model and prints its
    trace, then --samples rollouts of a few tasks. Prints what a training would meet: chat template,
    calls, tokens, memory, time, and whether rewards differ, so that there is something to learn.
    Nothing is trained. The exit code is 1 if the first rollout fails.
    """
    config = load(CheckConfig, tokens)
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    tasks = load_tasks(config.agent.tasks, "agent.tasks")
    count, how = min(config.check.tasks, len(tasks)), config.rollouts
    if why := choose_runners(config.model.name, config.agent, how, how.batch_size * how.group_size):
        print_line((why, "dim"))
    drawn = tasks_in_order(0, count, len(tasks), config.run.seed)
    rollouts: list[Rollout] = []
    with fixed_model(config, "check", [tasks[0], *(tasks[at] for at in drawn)]) as made:
        [first] = made.execute(_planned(config, made.task_ids[:1], 1))
        print_block(rollout_trace(made.session.store, first))
        if first.state is RolloutState.SUCCEEDED:
            rollouts = made.execute(_planned(config, made.task_ids[1:], config.check.samples))
    folder, store = made.session.folder, made.session.store
    emitted = store.rewards([rollout.id for rollout in rollouts])
    store.close()
    if rollouts:
        with console.status("measuring an update"):
            from agentrl.check.examine import examine

            rewards = rollout_rewards(rollouts, emitted)
            found = examine(config, steps_of(config, tasks), rollouts, made.calls, rewards)
        scores = score(rollouts, emitted, config.evaluation.success_reward)
        signal = found.pop("signal")
        found["success"] = [
            _success(scores, config.evaluation.success_reward),
            *(
                Finding(f"{failed} rollouts failed: {why}", f"their output is in {folder.logs}")
                for why, failed in count_failures(rollouts).items()
            ),
        ]
        found["signal"] = signal
        print_line()
        _print_findings(found)
        lines = {name: list(map(asdict, some)) for name, some in found.items()}
        folder.write_json(folder.summary, {"scores": asdict(scores), "findings": lines})
    print_line((f"recorded in {folder.root}", "dim"))
    if not rollouts:
        print_line("the first rollout failed, so no other was tried")
        sys.exit(1)


def _planned(config: CheckConfig, task_ids: Sequence[str], samples: int) -> list[NewRollout]:
    """Plan rollouts that sample as those of a training do."""
    return [
        NewRollout(
            task_id, f"check-{task_id}", Purpose.EVAL, step=0, index=index,
            seed=rollout_seed(config.run.seed, "check", task_id, index),
        )
        for task_id in task_ids
        for index in range(samples)
    ]  # fmt: skip


def _success(scores: Scores, success: float) -> Finding:
    low, high = scores.interval
    chances = ", ".join(f"pass@{k} {chance:.0%}" for k, chance in scores.pass_at.items() if k > 1)
    mean = "" if scores.reward is None else f"; mean reward {scores.reward:+.3g}"
    return Finding(
        f"{scores.accuracy:.0%} of {scores.rollouts} rollouts of {scores.tasks} tasks have a "
        f"reward of at least {success:g} (95 % interval {low:.0%} to {high:.0%}); {chances}{mean}"
    )


def _print_findings(found: Mapping[str, Sequence[Finding]]) -> None:
    rows: list[tuple[str, Text]] = []
    for name, some in found.items():
        for at, one in enumerate(some):
            fix = (f"\n→ {one.fix}", "yellow") if one.fix else ""
            rows.append(("" if at else name, Text.assemble(one.fact, fix)))
    print_block(facts(rows))
