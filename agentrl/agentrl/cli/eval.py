"""``agentrl eval``: run the agent on tasks with a model or a trained adapter, and count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress

from agentrl.config.checks import greedy_note
from agentrl.config.commands import EvalConfig
from agentrl.config.tasks import load_tasks
from agentrl.console.report import evaluation_report
from agentrl.runs.folder import RunFolder, adapters_to_serve
from agentrl.training.evaluation import plan_evaluation
from agentrl.training.failures import count_failures
from agentrl.training.intervals import pass_at_k, task_interval
from agentrl.training.session import Session
from agentrl_tracer.schemas import Call, Reward, Rollout
from agentrl_trainer.data.rewards import rollout_rewards
from agentrl_trainer.data.skip_reasons import evaluation_reasons


@dataclass(frozen=True, slots=True)
class Scores:
    """What an evaluation found. A rollout that failed or emitted no reward is no success."""

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


def evaluate(config: EvalConfig, console: Console) -> None:
    """Runs the evaluation and prints its report.

    Raises:
        ConfigError: the tasks or the adapter are not there.
        RunError: nothing can be executed.
    """
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
        base_only=not adapters,
        adapter_paths=adapters,
        asks_for=config.model.adapter if config.model.answered_by else None,
    )
    store, run_id = session.store, session.run_id
    task_ids = store.add_tasks(run_id, "eval", tasks)
    with session, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=len(tasks) * how.samples)
        session.wait_ready(progress.console.print)
        rollouts = session.execute(
            plan_evaluation(task_ids, 0, how.samples, config.run.seed, how.temperature),
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


def not_enforced(calls: Sequence[Call], policy: str) -> dict[str, int]:
    """By setting of the evaluation: answers in the policy's place that were sampled without it."""
    refused = Counter(
        name
        for call in calls
        if call.model == policy and call.params.get("not_enforced")
        for name in call.params["not_enforced"]
    )
    return dict(sorted(refused.items()))


def score(rollouts: Sequence[Rollout], rewards: Sequence[Reward], success: float) -> Scores:
    """Counts the rollouts whose reward is at least ``success``."""
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
