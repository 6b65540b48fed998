"""``agentrl eval``: run an agent on tasks with a model or an adapter, and count successes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.table import Table
from rich.text import Text

from agentrl.capacity import choose_runners
from agentrl.cli import Tokens
from agentrl.cli.fixed_model import fixed_model
from agentrl.config.checks import greedy_note
from agentrl.config.commands import EvalConfig
from agentrl.config.loading import load, load_tasks
from agentrl.console.output import print_block, print_line, print_sentences
from agentrl.console.tables import facts
from agentrl.runner.agent_spec import validate_agent
from agentrl.runs.statistics import pass_estimates
from agentrl.training.evaluation import plan_evaluation
from agentrl.training.metrics import count_failures
from agentrl_tracer.schemas import Reward, Rollout
from agentrl_trainer.data.rewards import rollout_rewards


@dataclass(frozen=True, slots=True)
class Scores:
    """Result of an evaluation. A rollout that failed or emitted no reward is no success."""

    tasks: int
    rollouts: int
    successes: int
    accuracy: float
    """Mean over tasks of the share of their rollouts that succeeded."""
    interval: tuple[float, float]
    """95 %, of the accuracy, with tasks as the independent units."""
    pass_at: dict[int, float]
    """By k: 1, 2, 4, ... and the samples of a task; empty with one sample."""
    pass_at_interval: dict[int, tuple[float, float]]
    """95 %, by the same rule."""
    reward: float | None
    """Mean over the rollouts that have one."""


def eval_command(*tokens: Tokens) -> None:
    """Run an agent on tasks, with a model or a trained adapter, and count its successes.

    Prints the accuracy with its 95 % interval, pass@k with several --samples per task, and the mean
    reward; the run folder keeps them in summary.json.
    """
    config = load(EvalConfig, tokens)
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    how, model = config.evaluation, config.model
    tasks = load_tasks(how.tasks, "evaluation.tasks")
    planned = len(tasks) * how.samples
    if why := choose_runners(config.model.name, config.agent, config.rollouts, planned):
        print_line((why, "dim"))
    if note := greedy_note(how.samples, how.temperature):
        print_sentences(f"note: {note}")
    asks_for = model.adapter if model.answered_by else None
    with fixed_model(config, "eval", tasks, asks_for) as made:
        rollouts = made.execute(plan_evaluation(made.task_ids, 0, how, config.run.seed))
    session = made.session
    rewards = session.store.rewards([rollout.id for rollout in rollouts])
    session.store.close()
    scores = score(rollouts, rewards, how.success_reward)
    problems = count_failures(rollouts)
    # Answers of another model that were sampled without a setting of the evaluation, by setting.
    refused = Counter(
        name
        for call in made.calls
        if model.answered_by and call.model == model.adapter
        for name in call.params.get("not_enforced") or ()
    )
    summary = asdict(scores) | {"failures": problems, "not_enforced": refused}
    session.folder.write_json(session.folder.summary, summary)
    print_block(evaluation_report(scores, problems))
    for name, count in refused.items():
        print_sentences(
            f"{model.answered_by} refuses {name} {how.temperature:g}: "
            f"{count} answers were sampled at its own {name}",
            "yellow",
        )
    print_line((f"recorded in {session.folder.root}", "dim"))


def evaluation_report(scores: Scores, problems: Mapping[str, int]) -> Table:
    """Lay out scores, and the failures by reason, for the terminal."""
    successes = f"{scores.successes} successes; {_interval(scores.interval)}"
    chances = [
        (f"pass@{k}", f"{chance:.1%} ({_interval(scores.pass_at_interval[k])})")
        for k, chance in scores.pass_at.items()
    ]
    return facts(
        [
            ("rollouts", f"{scores.rollouts} of {scores.tasks} tasks"),
            ("accuracy", f"[b]{scores.accuracy:.1%}[/] ({successes})"),
            *chances,
            ("mean reward", "–" if scores.reward is None else f"{scores.reward:+.3f}"),
            *(("failed", Text(f"{count}×: {reason}")) for reason, count in problems.items()),
        ]
    )


def _interval(bounds: tuple[float, float]) -> str:
    return f"95 % interval {bounds[0]:.1%} to {bounds[1]:.1%}"


def score(rollouts: Sequence[Rollout], rewards: Sequence[Reward], success: float) -> Scores:
    """Count the rollouts whose reward is at least ``success``."""
    earned = rollout_rewards(rollouts, rewards)
    by_task: dict[str, list[bool]] = {}
    for rollout in rollouts:
        reward = earned[rollout.id]
        by_task.setdefault(rollout.task_id, []).append(reward is not None and reward >= success)
    outcomes = list(by_task.values())
    chances = pass_estimates([(sum(task), len(task)) for task in outcomes])
    several = {k: one for k, one in chances.items() if len(chances) > 1}
    given = [reward for reward in earned.values() if reward is not None]
    return Scores(
        tasks=len(outcomes),
        rollouts=len(rollouts),
        successes=sum(map(sum, outcomes)),
        accuracy=chances[1].rate,
        interval=chances[1][1:],
        pass_at={k: one.rate for k, one in several.items()},
        pass_at_interval={k: one[1:] for k, one in several.items()},
        reward=fmean(given) if given else None,
    )
