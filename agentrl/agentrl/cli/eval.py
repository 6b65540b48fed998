"""``agentrl eval``: run an agent on tasks with a model or an adapter, and count successes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from statistics import fmean

from rich.table import Table
from rich.text import Text

from agentrl.capacity import choose_runners
from agentrl.cli import Tokens
from agentrl.cli.fixed_model import fixed_model
from agentrl.cli.tasks import read_tasks
from agentrl.config.checks import greedy_note
from agentrl.config.commands import EvalConfig
from agentrl.config.loading import load
from agentrl.console.output import print_block, print_line, print_sentences
from agentrl.console.tables import facts
from agentrl.history.evaluations import Outcomes, pass_at, stored_outcomes
from agentrl.history.sources import open_run
from agentrl.runner.agent_spec import validate_agent
from agentrl.scoring.functions import load_functions
from agentrl.training.evaluation import plan_evaluation
from agentrl.training.metrics import count_failures
from agentrl_tracer.schemas import Json
from agentrl_trainer.data.rewards import rollout_rewards


def eval_command(*tokens: Tokens) -> None:
    """Run an agent on tasks, with a model or a trained adapter, and count its successes.

    Prints the accuracy with its 95 % interval, pass@k with several --samples per task, and the mean
    reward; the run folder keeps them in summary.json.
    """
    config = load(EvalConfig, tokens)
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    rewards = load_functions(config.rewards)
    how, model = config.evaluation, config.model
    tasks = read_tasks(how.tasks, "evaluation.tasks", config.agent)
    planned = len(tasks) * how.samples
    if why := choose_runners(config.model.name, config.agent, config.rollouts, planned):
        print_line((why, "dim"))
    if note := greedy_note(how.samples, how.temperature):
        print_sentences(f"note: {note}")
    asks_for = model.adapter if model.answered_by else None
    with fixed_model(config, "eval", tasks, asks_for, rewards) as made:
        rollouts = made.execute(plan_evaluation(made.task_ids, 0, how, config.run.seed))
    session = made.session
    earned = rollout_rewards(rollouts, session.store.rewards([one.id for one in rollouts])).values()
    session.store.close()
    with contextlib.closing(open_run(session.folder)) as run:
        [found] = stored_outcomes(run).values()
    known = [reward for reward in earned if reward is not None]
    scores = scores_of(found) | {"reward": fmean(known) if known else None}
    problems = count_failures(rollouts)
    # Answers of another model that were sampled without a setting of the evaluation, by setting.
    refused = Counter(
        name
        for call in made.calls
        if model.answered_by and call.model == model.adapter
        for name in call.params.get("not_enforced") or ()
    )
    summary = scores | {"failures": problems, "not_enforced": refused}
    session.folder.write_json(session.folder.summary, summary)
    print_block(evaluation_report(scores, problems))
    for name, count in refused.items():
        print_sentences(
            f"{model.answered_by} refuses {name} {how.temperature:g}: "
            f"{count} answers were sampled at its own {name}",
            "yellow",
        )
    print_line((f"recorded in {session.folder.root}", "dim"))


def scores_of(found: Outcomes) -> Json:
    """Return what ``summary.json`` keeps of an evaluation; tasks are the independent units.

    ``accuracy`` is the mean over tasks of the share of their rollouts that succeeded; ``pass_at``
    is by k: 1, 2, 4, ... and the samples of a task; empty with one sample. Intervals are 95 %.
    """
    chances = pass_at(found)
    several = chances if len(chances) > 1 else {}
    return {
        "tasks": len(found),
        "rollouts": sum(one.samples for one in found.values()),
        "successes": sum(one.successes for one in found.values()),
        "accuracy": chances[1].rate,
        "interval": chances[1][1:],
        "pass_at": {k: one.rate for k, one in several.items()},
        "pass_at_interval": {k: one[1:] for k, one in several.items()},
    }


def evaluation_report(scores: Json, problems: Mapping[str, int]) -> Table:
    """Lay out scores, and the failures by reason, for the terminal."""
    successes = f"{scores['successes']} successes; {_interval(scores['interval'])}"
    chances = [
        (f"pass@{k}", f"{chance:.1%} ({_interval(scores['pass_at_interval'][k])})")
        for k, chance in scores["pass_at"].items()
    ]
    return facts(
        [
            ("rollouts", f"{scores['rollouts']} of {scores['tasks']} tasks"),
            ("accuracy", f"[b]{scores['accuracy']:.1%}[/] ({successes})"),
            *chances,
            ("mean reward", "–" if scores["reward"] is None else f"{scores['reward']:+.3f}"),
            *(("failed", Text(f"{count}×: {reason}")) for reason, count in problems.items()),
        ]
    )


def _interval(bounds: tuple[float, float]) -> str:
    return f"95 % interval {bounds[0]:.1%} to {bounds[1]:.1%}"
