"""What ``agentrl runs`` prints: runs, one run, its evaluations, comparisons, rollouts and calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.console.output import plain, print_block, print_line, print_sentences
from agentrl.console.report import calls_line, cores_line
from agentrl.console.tables import facts, print_rows, sparkline
from agentrl.history import evaluations
from agentrl.history.evaluations import differences, held_out
from agentrl.history.rollout.conversation import answer_excerpt, prompt_excerpt
from agentrl.history.run_list import Listed
from agentrl.history.sources import OpenRun
from agentrl.runs.circumstances import why_failed
from agentrl.runs.metric_names import HELD_OUT, HELD_OUT_LOSS, LOSS, REWARD
from agentrl.runs.recorded import CONTINUED, OFFLINE, how_to_continue, shown
from agentrl.runs.summary import shares_of_cores
from agentrl_tracer.schemas import AttemptState, Call, Json, PromptKinds, RolloutState, Verified

if TYPE_CHECKING:
    from agentrl.scoring.rescore import Rescored

_CURVE = 24
_MOST_BRANCHED = 5
_UNBRANCHED = ("continued", "first_call", "new_conversation", "no_rollout")
"""A conversation has to begin somewhere. Every other way of not continuing is a branch."""


def show_runs(to: Console, runs: Sequence[Listed]) -> None:
    """Show a row for each run."""
    rows = [
        {
            "name": run.name,
            "kind": run.kind,
            "state": run.state,
            "started": _when("%Y-%m-%d %H:%M", run.created_at),
            "steps": run.progress.step,
            "reward": run.rewards[-1] if run.rewards else None,
            "curve": sparkline(run.rewards[-_CURVE:]),
            "held-out": run.held_out[-1] if run.held_out else None,
        }
        for run in runs
    ]
    columns = "name kind state started steps reward:+.3f curve held-out:.0%"
    print_rows(to, rows, columns, expendable="curve kind started steps held-out")


# ---- one run


def show_run(to: Console, run: OpenRun) -> None:
    """Show a run: steps, how rollouts ended, where calls went, evaluations."""
    row, store = run.current(), run.store
    print_line((run.name, "bold"), f" ({row['kind']}, {row['state']})", to=to)
    if why := why_failed(run.folder):
        print_sentences(f"failed: {plain(why)}", "red", to)
    if row["kind"] in CONTINUED and row["state"] in ("interrupted", "pruned", "failed"):
        print_line((how_to_continue(run.folder, row["kind"]), "cyan"), to=to)
    steps = [{**known, "step": step} for step, known in store.metrics(run.id).items()]
    if row["kind"] in OFFLINE:
        columns = f"step epoch:.0f {LOSS}:.4f {HELD_OUT_LOSS}:.4f {HELD_OUT}:.1%"
        print_rows(to, steps, columns, expendable=HELD_OUT, apart=True)
        return
    columns = f"step {REWARD}:+.3f {HELD_OUT}:.0% calls:.0f calls/trained:.0f groups/used:.0f"
    print_rows(to, steps, columns, apart=True)
    outcomes, continuity = store.outcomes(run.id), store.continuity(run.id)
    prompts = Counter[str]()
    for group in continuity:
        prompts.update({name: count * group.rollouts for name, count in group.kinds.items()})
    known = {
        "rollouts": _counts({RolloutState(name).shown: n for name, n in outcomes.rollouts.items()}),
        "attempts": _counts({AttemptState(name).shown: n for name, n in outcomes.attempts.items()}),
        "rewards by policy": _counts(outcomes.policy_rewards),
        "policies": ", ".join(f"{name} {value}" for name, value in row["policies"].items()),
        "calls": calls_line(store.accounting(run.id)),
        "prompts": _counts(prompts),
        "branched most": branched_most(continuity),
        "cores busy": cores_line(shares_of_cores(run.folder)),
    }
    print_line(to=to)
    print_block(facts((name, said) for name, said in known.items() if said), to)
    _show_evaluations(to, run)


def show_verified(to: Console, verified: Verified) -> None:
    """Show what a run's calls count to, and what does not add up."""
    print_block(facts([("calls", calls_line(verified.counted))]), to)
    print_line(verified.fault or ("everything adds up", "green"), to=to)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(counts).most_common())


def branched_most(continuity: Sequence[PromptKinds]) -> str:
    """Name the rollouts most of whose prompts did not continue a call exactly, and why."""
    why = {
        group.example: {k: n for k, n in group.kinds.items() if k not in _UNBRANCHED}
        for group in continuity
    }
    most = sorted(filter(why.get, why), key=lambda one: -sum(why[one].values()))
    return "; ".join(f"{one}: {_counts(why[one])}" for one in most[:_MOST_BRANCHED])


def _show_evaluations(to: Console, run: OpenRun) -> None:
    """Show each evaluation, the newest by the fields of its tasks, and what flipped since."""
    found = evaluations.stored_outcomes(run)
    if not found:
        return
    rows = [
        {"evaluation": f"step {step}", "tasks": len(known), "k": k, "pass@k": chance}
        for step, known in found.items()
        for k, chance in evaluations.pass_at(known).items()
    ]
    print_rows(to, rows, apart=True)
    first, last, tasks = min(found), max(found), evaluations.evaluated_tasks(run)
    rows = [
        {"by field": f"{field} = {label}", "tasks": len(group),
         f"success at step {last}": evaluations.success(group)}
        for field in evaluations.fields(tasks)
        for label, group in evaluations.by_field(tasks, found[last], field).items()
    ]  # fmt: skip
    print_rows(to, rows, apart=True)
    if first != last and (paired := evaluations.pair(found[first], found[last])):
        _tell_change(to, f"step {first} to {last}", paired)


# ---- several runs


def show_comparison(to: Console, runs: Sequence[OpenRun]) -> None:
    """Show in what runs differ: settings, curves and held-out success."""
    names = [run.name for run in runs]
    if len({*names}) < len(names):
        names = [shown(run.folder.root) for run in runs]
    settings = differences(runs).items()
    rows = [{"setting": name} | dict(zip(names, given, strict=True)) for name, given in settings]
    print_rows(to, rows)
    if not rows:
        print_line("all settings are equal", to=to)
    for metric in (REWARD, HELD_OUT):
        curves = {
            name: [row[metric] for row in run.store.metrics(run.id, [metric]).values()]
            for name, run in zip(names, runs, strict=True)
        }
        rows = [
            {metric: name, "first": values[0], "last": values[-1], "best": max(values),
             "curve": sparkline(values[-_CURVE:])}
            for name, values in curves.items() if values
        ]  # fmt: skip
        columns = f"{metric} first:.3g last:.3g best:.3g curve"
        print_rows(to, rows, columns, apart=True)
    newest = zip(names, held_out(runs, evaluations.stored_outcomes), strict=True)
    newest = [(name, one) for name, one in newest if one is not None]
    rows = [
        {"held-out": name, "step": one.step, "tasks": one.tasks, "success": one.success}
        for name, one in newest
    ]
    print_rows(to, rows, apart=True)
    for name, one in newest:
        if one.against_first is not None:
            _tell_change(to, f"{names[0]} to {name}", one.against_first)


def _tell_change(to: Console, what: str, paired: evaluations.Paired) -> None:
    said = (
        f"{what}: {100 * paired.difference:+.1f} points on {paired.tasks} tasks, "
        f"{len(paired.gained)} gained, {len(paired.lost)} lost; "
        f"p = {paired.p_value:.2g} (paired exact sign-flip test)"
    )
    print_line(to=to)
    print_sentences(said, to=to)


# ---- rollouts and calls


def show_rollouts(to: Console, rows: Sequence[Json]) -> None:
    """Show a row for each rollout."""
    columns = (
        "id step purpose task index status reward:+.3g feedback attempts calls prompt_tokens:, "
        "tokens:, seconds:.1f agent error"
    )
    expendable = "prompt_tokens agent attempts index calls seconds tokens feedback purpose error"
    print_rows(to, rows, columns, expendable=expendable, cut="error")


def show_calls(to: Console, calls: Sequence[Call]) -> None:
    """Show a row for each call."""
    rows = [
        {
            "id": call.id,
            "started": _when("%m-%d %H:%M:%S", call.started_at),
            "model": call.model,
            "adapter": f"{call.adapter}@{call.adapter_version}" if call.adapter else None,
            "tokens": call.tokens and "{} + {}".format(*call.tokens),
            "seconds": call.ended_at and call.ended_at - call.started_at,
            "verdict": call.skip_reason or (call.trained_step and f"step {call.trained_step}"),
            "asked": prompt_excerpt(call.request),
            "answer": call.error or answer_excerpt(call.response),
        }
        for call in calls
    ]
    columns = "id started model adapter tokens seconds:.1f verdict asked answer"
    expendable = "asked verdict adapter seconds model tokens started"
    print_rows(to, rows, columns, expendable=expendable, cut="answer")


def _when(form: str, at: float) -> str:
    return time.strftime(form, time.localtime(at))


def show_rescored(to: Console, done: Rescored, *, alone: bool) -> None:
    """Show what a re-score did to the rewards of a run."""
    given: dict[str, list[float]] = {}
    for one in sorted(done.rewards, key=lambda one: one.name):
        given.setdefault(one.name, []).append(one.value)
    rows = [{"reward": k, "rollouts": len(x), "mean": fmean(x)} for k, x in given.items()]
    print_rows(to, rows, "reward rollouts:, mean:+.3f")
    scored = len({one.rollout_id for one in done.rewards})
    said = f"{scored:,} of {done.rollouts:,} rollouts were scored"
    if left := done.rollouts - scored:
        said += f"; {left:,} failed, have a policy's reward or got none, and stay as they are"
    print_sentences(said, to=to)
    totals = done.before, done.after
    means = [f"{fmean(x):+.3f} of {len(x):,}" if x else "none" for x in totals]
    what = "these rewards alone, others are set aside" if alone else "the sum of all rewards"
    print_line(f"mean total reward {means[0]} → {means[1]} rollouts; what counts is {what}", to=to)
