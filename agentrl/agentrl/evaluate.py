"""``agentrl eval``: run the agent on tasks with a base model or a trained adapter, and count."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress

from agentrl.config import AdapterConfig, EvalConfig
from agentrl.report import evaluation_report
from agentrl.run_folder import RunFolder, adapter_folders
from agentrl.session import Session, failures, plan_evaluation
from agentrl.tasks import load_tasks
from agentrl_tracer.schemas import SkipReason
from agentrl_trainer.rewards import rollout_rewards


def evaluate(config: EvalConfig, console: Console) -> None:
    """Runs the evaluation and prints its report."""
    tasks = load_tasks(config.tasks, "tasks")
    adapters = adapter_folders(config.adapter_path, config) if config.adapter_path else {}
    if not config.adapters:  # those that the folder has
        config.adapters = {name: AdapterConfig() for name in adapters}  # pyright: ignore[reportCallIssue]
    folder = RunFolder.create(config.runs, None, "eval")
    session = Session(
        folder,
        config,
        "eval",
        base_only=not adapters,
        adapter_paths=adapters,
    )
    store, run_id = session.store, session.run_id
    task_ids = store.add_tasks(run_id, "eval", tasks)
    with session, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=len(tasks) * config.samples)
        session.wait_ready()
        rollouts = session.execute(
            plan_evaluation(task_ids, 0, config.samples, config.seed, config.temperature),
            lambda done, total: progress.update(bar, completed=done, description="rollouts"),
        )
    ids = [rollout.id for rollout in rollouts]
    calls = store.calls(rollout_ids=ids)
    store.settle(trained={}, skipped=dict.fromkeys((c.id for c in calls), SkipReason.EVALUATION))
    scores = rollout_rewards(rollouts, store.rewards(ids)).values()
    earned = [score for score in scores if score is not None]
    successes = sum(score >= config.success_reward for score in earned)
    mean = sum(earned) / len(earned) if earned else None
    store.end_run(run_id, "finished")
    store.close()
    console.print(evaluation_report(rollouts, successes, mean, failures(rollouts)))
    console.print(f"[dim]recorded in {folder.root}[/]")
