"""``agentrl eval``: run an agent on tasks with a model or an adapter, and count successes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from agentrl.cli import Tokens
from agentrl.config.checks import greedy_note
from agentrl.config.commands import EvalConfig
from agentrl.config.loading import load, parse_flags
from agentrl.config.tasks import load_tasks
from agentrl.console.output import console
from agentrl.runner import validate_agent
from agentrl.runs.folder import RunFolder, adapters_to_serve
from agentrl.training.evaluation import pass_at_k, plan_evaluation, task_interval
from agentrl.training.metrics import count_failures
from agentrl.training.session import Session
from agentrl_tracer.schemas import Call, Reward, Rollout
from agentrl_trainer.data.rewards import rollout_rewards
from agentrl_trainer.data.skip_reasons import evaluation_reasons


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
    config = load(EvalConfig, parse_flags(EvalConfig, tokens))
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    how = config.evaluation
    tasks = load_tasks(how.tasks, "evaluation.tasks")
    adapters = adapters_to_serve(config)
    if note := greedy_note(how.samples, how.temperature):
        console.print(f"note: {note}", soft_wrap=True)
    folder = RunFolder.create(config.run.folder, None, "eval")
    session = Session(
        folder,
        config,
        "eval",
        adapter_paths=adapters,
        asks_for=config.model.adapter if config.model.answered_by else None,
    )
    store, run_id = session.store, session.run_id
    task_ids = store.add_tasks(run_id, "eval", tasks)
    with session, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=len(tasks) * how.samples)
        session.wait_ready(progress.console.print)
        rollouts = session.execute(
            plan_evaluation(task_ids, 0, how, config.run.seed),
            lambda done, total: progress.update(bar, completed=done, description="rollouts"),
        )
    ids = [rollout.id for rollout in rollouts]
    calls = store.calls(rollout_ids=ids)
    store.settle(trained={}, skipped=evaluation_reasons(calls))
    scores = score(rollouts, store.rewards(ids), how.success_reward)
    store.end_run(run_id, "finished")
    store.close()
    problems = count_failures(rollouts)
    refused = not_enforced(calls, config.model.adapter) if config.model.answered_by else {}
    summary = asdict(scores) | {"failures": problems, "not_enforced": refused}
    folder.write_json(folder.summary, summary)
    console.print(evaluation_report(scores, problems))
    for name, count in refused.items():
        console.print(
            f"[yellow]{config.model.answered_by} refuses {name} {how.temperature:g}: "
            f"{count} answers were sampled at its own {name}[/]"
        )
    console.print(f"[dim]recorded in {folder.root}[/]")


def evaluation_report(scores: Scores, problems: Mapping[str, int]) -> Table:
    """Lay out scores, and the failures by reason, for the terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("rollouts", f"{scores.rollouts} of {scores.tasks} tasks")
    successes = f"{scores.successes} successes; {_interval(scores.interval)}"
    table.add_row("accuracy", f"[b]{scores.accuracy:.1%}[/] ({successes})")
    for k, chance in scores.pass_at.items():
        table.add_row(f"pass@{k}", f"{chance:.1%} ({_interval(scores.pass_at_interval[k])})")
    table.add_row("mean reward", "–" if scores.reward is None else f"{scores.reward:+.3f}")
    for reason, count in problems.items():
        table.add_row("failed", Text(f"{count}×: {reason}"))
    return table


def _interval(bounds: tuple[float, float]) -> str:
    return f"95 % interval {bounds[0]:.1%} to {bounds[1]:.1%}"


def not_enforced(calls: Sequence[Call], policy: str) -> dict[str, int]:
    """Count the answers that were sampled without a setting of the evaluation, by setting."""
    refused = Counter(
        name
        for call in calls
        if call.model == policy and call.params.get("not_enforced")
        for name in call.params["not_enforced"]
    )
    return dict(sorted(refused.items()))


def score(rollouts: Sequence[Rollout], rewards: Sequence[Reward], success: float) -> Scores:
    """Count the rollouts whose reward is at least ``success``."""
    earned = rollout_rewards(rollouts, rewards)
    by_task: dict[str, list[bool]] = {}
    for rollout in rollouts:
        reward = earned[rollout.id]
        by_task.setdefault(rollout.task_id, []).append(reward is not None and reward >= success)
    outcomes = list(by_task.values())
    samples = min(map(len, outcomes))
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples}) if samples > 1 else []
    chances = {k: [pass_at_k(sum(task), len(task), k) for task in outcomes] for k in {1, *ks}}
    given = [reward for reward in earned.values() if reward is not None]
    return Scores(
        tasks=len(outcomes),
        rollouts=len(rollouts),
        successes=sum(map(sum, outcomes)),
        accuracy=_mean(chances[1]),
        interval=task_interval(chances[1], samples),
        pass_at={k: _mean(chances[k]) for k in ks},
        pass_at_interval={k: task_interval(chances[k], samples) for k in ks},
        reward=_mean(given) if given else None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
