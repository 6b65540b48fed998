"""``agentrl eval``: run an agent on tasks with a model or an adapter, and count successes."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table
from rich.text import Text

from agentrl.capacity import choose_runners
from agentrl.cli import Tokens
from agentrl.cli.fixed_model import fixed_model
from agentrl.cli.tasks import read_tasks
from agentrl.config.checks import greedy_note
from agentrl.config.commands import EvalConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load
from agentrl.config.settings.models import BASE
from agentrl.console.output import console, print_block, print_line, print_sentences
from agentrl.console.tables import facts, print_rows
from agentrl.history.evaluations import (
    Outcomes,
    by_field,
    fields,
    has_field,
    pair,
    pass_at,
    stored_outcomes,
    success,
)
from agentrl.history.sources import open_run
from agentrl.runner.agent_spec import validate_agent
from agentrl.runs.folder import RunFolder, adapter_folders, run_and_step
from agentrl.runs.statistics import Estimate
from agentrl.scoring.functions import RewardFunction, load_functions
from agentrl.training.evaluation import plan_evaluation
from agentrl.training.metrics import count_failures
from agentrl_tracer.schemas import Json
from agentrl_trainer.data.rewards import rollout_rewards


def _max_tokens_of(source: str) -> int | None:
    """Return the setting of the training run that an adapter is of; None: it is of none."""
    run, _ = run_and_step(source)
    return run.read_config().get("sampler", {}).get("max_tokens") if run.config.is_file() else None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One model's evaluation."""

    name: str
    """As it was given: ``runs/hello@best``, ``base``."""
    folder: RunFolder
    found: Outcomes
    summary: Json

    @property
    def accuracy(self) -> Estimate:
        return success(self.found)


def eval_command(*tokens: Tokens) -> None:
    """Run an agent on tasks, with a model or trained adapters, and count its successes.

    Prints the accuracy with its 95 % interval, pass@k with several --samples per task, and the mean
    reward; the run folder keeps them in summary.json. Several --adapter-path, one of which may be
    `base`, run the same tasks with the same seeds, each in a run folder of its own, and are
    compared with the first by an exact paired test. The exit code is 1 below --fail-under.
    """
    config = load(EvalConfig, tokens)
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    rewards = load_functions(config.rewards)
    how = config.evaluation
    tasks = read_tasks(how.tasks, "evaluation.tasks", config.agent)
    for field in how.by:
        if not has_field(tasks, field):
            known = ", ".join(fields(tasks)) or "none that groups them"
            raise ConfigError(f"evaluation.by: no task has a field {field!r}; there is {known}")
    if why := choose_runners(config, len(tasks) * how.samples):
        print_line((why, "dim"))
    if note := greedy_note(how.samples, how.temperature):
        print_sentences(f"note: {note}")
    models = config.model.evaluated()
    for _, source, _ in models:
        adapter_folders(config, source)
    done = [_evaluate(config, tasks, rewards, *one, alone=len(models) == 1) for one in models]
    tables = {"by": by_rows(tasks, done, how.by), "compared": comparison(done)}
    print_rows(console, tables["by"], apart=True)
    if len(done) > 1:
        columns = "model accuracy reward:+.3f points:+.1f gained lost p:.2g"
        print_rows(console, tables["compared"], columns, apart=True)
        against = "points, gained and lost tasks and p (paired exact sign-flip test): to"
        print_sentences(f"{against} {done[0].name}", "dim")
    for one in done:
        one.folder.write_json(one.folder.summary, one.summary | tables)
    print_line((f"recorded in {', '.join(str(one.folder.root) for one in done)}", "dim"))
    fail_under(done, how.fail_under)


def _evaluate(
    config: EvalConfig,
    tasks: Sequence[Json],
    rewards: Sequence[RewardFunction],
    name: str,
    source: str | None,
    answered_by: str | None,
    *,
    alone: bool,
) -> Evaluated:
    """Run the tasks with one model, in a run folder of its own, and report its successes."""
    config = config.model_copy(deep=True)
    how, model = config.evaluation, config.model
    model.adapter_path, model.answered_by = [source] if source else [], answered_by
    if not alone:
        print_line((name, "bold"))
    if source and (trained_with := _max_tokens_of(source)) not in (None, config.sampler.max_tokens):
        print_sentences(
            f"note: {source} was trained with --max-tokens {trained_with}, and is evaluated with "
            f"{config.sampler.max_tokens}"
        )
    asks_for = model.adapter if answered_by else None
    with fixed_model(config, "eval", tasks, asks_for, rewards, source) as made:
        rollouts = made.execute(plan_evaluation(made.task_ids, 0, how, config.run.seed))
    session = made.session
    earned = rollout_rewards(rollouts, session.store.rewards([one.id for one in rollouts]))
    session.store.close()
    with contextlib.closing(open_run(session.folder)) as run:
        [found] = stored_outcomes(run).values()
    known = [reward for reward in earned.values() if reward is not None]
    unpaid = sum(one.winner is not None and earned[one.id] is None for one in rollouts)
    scores = scores_of(found) | {"reward": fmean(known) if known else None, "no_reward": unpaid}
    problems = count_failures(rollouts)
    # Answers of another model that were sampled without a setting of the evaluation, by setting.
    refused = Counter(
        name
        for call in made.calls
        if answered_by and call.model == model.adapter
        for name in call.params.get("not_enforced") or ()
    )
    summary = {"model": name, **scores, "failures": problems, "not_enforced": refused}
    session.folder.write_json(session.folder.summary, summary)
    print_block(evaluation_report(scores, problems))
    for setting, count in refused.items():
        print_sentences(
            f"{answered_by} refuses {setting} {how.temperature:g}: "
            f"{count} answers were sampled at its own {setting}",
            "yellow",
        )
    return Evaluated(name, session.folder, found, summary)


# ---- several models, and fields of the tasks


def comparison(done: Sequence[Evaluated]) -> list[Json]:
    """Return a row for each model, compared with the first on the tasks that both have."""
    rows: list[Json] = []
    for one in done:
        row: Json = {"model": one.name, "run": one.folder.name, "accuracy": one.accuracy}
        row["reward"] = one.summary["reward"]
        if one is not done[0] and (paired := pair(done[0].found, one.found)) is not None:
            row |= {
                "points": 100 * paired.difference,
                "gained": len(paired.gained),
                "lost": len(paired.lost),
                "p": paired.p_value,
            }
        rows.append(row)
    return rows


def by_rows(tasks: Sequence[Json], done: Sequence[Evaluated], by: Sequence[str]) -> list[Json]:
    """Return a row for each value of each field, with the accuracy of each model."""
    rows: list[Json] = []
    for field in by:
        groups = [by_field(tasks, one.found, field) for one in done]
        for label in dict.fromkeys(label for group in groups for label in group):
            known = {
                one.name if len(done) > 1 else "accuracy": success(group[label])
                for one, group in zip(done, groups, strict=True)
                if label in group
            }
            count = max(len(group.get(label, ())) for group in groups)
            rows.append({"field": f"{field} = {label}", "tasks": count} | known)
    return rows


def fail_under(done: Sequence[Evaluated], least: float | None) -> None:
    """Exit with 1 if a model is below what it is held to."""
    held = [one for one in done if one.name != BASE] or done
    below = [one for one in held if least is not None and one.accuracy.rate < least]
    for one in below:
        print_sentences(f"{one.name}: accuracy {one.accuracy.rate:.1%} is below {least:.1%}", "red")
    if below:
        sys.exit(1)


# ---- one model


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
        "accuracy": success(found).rate,
        "interval": chances[1][1:],
        "pass_at": {k: one.rate for k, one in several.items()},
        "pass_at_interval": {k: one[1:] for k, one in several.items()},
    }


def evaluation_report(scores: Json, problems: Mapping[str, int]) -> Table:
    """Lay out scores, and the failures by reason, for the terminal."""
    missing = [("no reward", f"{scores['no_reward']} rollouts")] if scores["no_reward"] else []
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
            *missing,
            *(("failed", Text(f"{count}×: {reason}")) for reason, count in problems.items()),
        ]
    )


def _interval(bounds: tuple[float, float]) -> str:
    return f"95 % interval {bounds[0]:.1%} to {bounds[1]:.1%}"
