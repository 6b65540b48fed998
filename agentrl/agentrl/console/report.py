"""What is printed when a command is done."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from agentrl.console.output import print_block, print_line, whole
from agentrl.console.tables import fitted
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.runs.recorded import shown
from agentrl_tracer.schemas import (
    REWARD_RANGE,
    Accounting,
    Json,
    PromptKinds,
    SkipReason,
    Verified,
)

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.config.settings import ModelSettings
    from agentrl.runs.summary import Summary
    from agentrl_tracer.store import Store

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BRANCHED = 20
_NAME_WIDTH = 17
_RUNS_CURVE = 24
Metrics = Mapping[int, Mapping[str, float]]
"""Metrics by name, by step."""


def facts(rows: Iterable[tuple[str, Any]]) -> Table:
    """Lay out named facts in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=_NAME_WIDTH)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def sparkline(values: list[float]) -> str:
    """Draw values as one line of bars, scaled to their own range."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


# ---- the end of a training run


def training_report(summary: Summary) -> Group:
    """Show replies before and after, the figures, and where things are."""
    accounting = summary.accounting
    rewards = [reward for reward in summary.rewards if reward is not None]
    change = f"{rewards[0]:+.2f} → [b]{rewards[-1]:+.2f}[/]" if rewards else "there was none"
    rows: list[tuple[str, str | Text]] = [("mean reward", f"{change} in {summary.steps} steps")]
    if summary.held_out:
        first, last = summary.held_out[0][1], summary.held_out[-1][1]
        rows.append(("held-out accuracy", f"{first:.0%} → [b]{last:.0%}[/]"))
    if (best := summary.best) is not None and best[0] != summary.held_out[-1][0]:
        rows.append(("best held-out", f"{best[1]:.0%} at step {best[0]}"))
    if summary.ended is not None:
        rows.append(("ended by", Text(f"{summary.ended.guard}: {summary.ended.sentence}")))
    split = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.seconds.items())
    rows.append(("time", f"{sum(summary.seconds.values()):.0f} s: {split}"))
    busy = summary.cores_busy
    told = [f"{name} {busy[name]:.0%}" for name in summary.seconds if name in busy]
    rows.append(("cores busy", ", ".join(told)))
    places = [
        whole((f"{name:<{_NAME_WIDTH}}  ", "dim"), shown(path))
        for name, path in (
            ("learning curve", summary.folder.picture),
            ("adapter", summary.folder.adapter),
            *([("best adapter", summary.folder.best_adapter)] if best is not None else []),
        )
    ]
    if summary.learned_nothing:
        trainable = accounting.recorded - accounting.skipped.get(SkipReason.EVALUATION, 0)
        title = f"[b red]nothing was learned: 0 of {trainable} calls trained[/]"
        return Group(title, facts([*_why_nothing_trained(accounting), *rows]), *places)
    replies = Table(box=None, padding=(0, 2), pad_edge=False)
    for name in ("held-out prompt", "before", "after"):
        replies.add_column(name, overflow="fold")
    for prompt, before, after in summary.replies:
        replies.add_row(Text(prompt, "dim"), Text(before), Text(after, "green"))
    shown_replies = [replies, Text()] if summary.replies else []
    return Group("[b green]trained[/]", *shown_replies, facts(rows), *places)


_WHAT_HELPS: dict[str, str] = {
    SkipReason.NO_REWARD: "their rollouts emitted no reward: return a number, or call emit_reward",
    SkipReason.REFUSED_REWARD: f"their rollouts emitted what is no reward ({REWARD_RANGE}; maxrl "
    "takes no negative ones): runs show says what",
    SkipReason.ZERO_ADVANTAGE: "all rollouts of a group earned the same, so that none was better: "
    "reward more finely, or choose tasks that are solved at times",
    SkipReason.FAILED_ROLLOUT: "their rollouts failed; runs show says how, and logs why",
    SkipReason.FAILED_ATTEMPT: "their attempts failed; runs show says how, and logs why",
    SkipReason.SMALL_GROUP: "too few rollouts of their group have a reward (min_group)",
    SkipReason.NOT_TRAINABLE_MODEL: "they asked for a model that does not train: the agent should "
    "ask for the one in AGENTRL_MODEL",
    SkipReason.OTHER_AGENT: "they are of agents that train no adapter (adapters, skip_agents)",
    SkipReason.OFF_POLICY: "they, or over Tinker others of their step, were sampled at another "
    "temperature than 1, filtered, biased or constrained: let the agent set none of that",
    SkipReason.NON_FINITE: "their log-probs, loss or gradient were not finite",
    SkipReason.NON_FINITE_STEP: "the loss or gradient was not finite: lower the learning rate",
}


def _why_nothing_trained(accounting: Accounting) -> list[tuple[str, str]]:
    """Return each reason with its count, the most frequent first."""
    counts = Counter(accounting.skipped)
    if accounting.recorded == counts.pop(SkipReason.EVALUATION, 0):
        said = ["the agent did not ask the model: it is at OPENAI_BASE_URL, named AGENTRL_MODEL"]
    else:
        said = [f"{n} {why}: {_WHAT_HELPS.get(why, '')}" for why, n in counts.most_common()]
    return [("[red]not trained[/]", one.removesuffix(": ")) for one in said]


def serve_command(adapter: Path, model: ModelSettings) -> str:
    """Return the one line that serves a trained adapter."""
    flags = "" if model.name == "agentrl-tiny" else f" --model {model.name}"
    flags += " --trust-remote-code" if model.trust_remote_code else ""
    return f"agentrl serve --adapter-path {shown(adapter)}{flags}"


# ---- agentrl runs


def runs_table(runs: Sequence[tuple[Json, str, Metrics]], width: int) -> Table:
    """Show a row for each run, of which a state is given; columns as ``width`` has room for."""
    rewards, held_out = (
        [[row[name] for row in metrics.values() if name in row] for _, _, metrics in runs]
        for name in (REWARD, HELD_OUT)
    )
    columns = {
        "name": [run["name"] for run, _, _ in runs],
        "kind": [run["kind"] for run, _, _ in runs],
        "state": [state for _, state, _ in runs],
        "started": [
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run["created_at"])) for run, _, _ in runs
        ],
        "steps": [str(max(metrics, default=0)) for _, _, metrics in runs],
        "reward": [f"{values[-1]:+.3f}" if values else "–" for values in rewards],
        "curve": [sparkline(values[-_RUNS_CURVE:]) for values in rewards],
        "held-out": [f"{values[-1]:.0%}" if values else "–" for values in held_out],
    }
    return fitted(columns, width, ("curve", "kind", "started", "steps", "held-out"))


def show_run(console: Console, store: Store, run: Json, state: str, how_to_continue: str) -> None:
    """Show a run: steps, how rollouts ended, where calls went, and how their prompts began."""
    run_id: str = run["id"]
    accounting, outcomes = store.accounting(run_id), store.outcomes(run_id)
    print_line((run["name"], "bold"), f" ({run['kind']}, {state})", to=console)
    if run["kind"] == "train" and state in ("interrupted", "failed"):
        print_line((how_to_continue, "cyan"), to=console)
    columns = {
        "mean reward": (REWARD, "+.3f"),
        "held-out": (HELD_OUT, ".0%"),
        "calls": ("calls", ".0f"),
        "trained": ("calls/trained", ".0f"),
        "groups used": ("groups/used", ".0f"),
    }
    steps = [
        (step, *(f"{row[key]:{form}}" if key in row else "" for key, form in columns.values()))
        for step, row in store.metrics(run_id).items()
    ]
    _print_table(console, ("step", *columns), steps)
    policies = ", ".join(f"{name} {value}" for name, value in run["policies"].items())
    ends = [
        *_counted("rollouts: ", outcomes.rollouts),
        *_counted("attempts: ", outcomes.attempts),
        *_counted("rewards by policy: ", outcomes.policy_rewards),
        ("[dim]policies[/]", f"[dim]{policies}[/]"),
    ]
    _print_table(console, ("ended", ""), ends)
    adds_up = ("adds up", "[green]yes[/]" if accounting.adds_up else "[red]no[/]")
    _print_table(console, ("calls", ""), [*_sums(accounting), adds_up])
    if continuity := store.continuity(run_id):
        _show_continuity(console, continuity)


def show_verified(console: Console, verified: Verified) -> None:
    """Show what a run's calls count to, and what does not add up."""
    _print_table(console, ("calls", ""), _sums(verified.counted))
    console.print(verified.fault or "[green]everything adds up[/]", soft_wrap=True)


def _sums(accounting: Accounting) -> list[tuple[str, int]]:
    return [
        ("proxied", accounting.proxied),
        ("recorded", accounting.recorded),
        ("trained", accounting.trained),
        *_counted("skipped: ", accounting.skipped),
        ("not judged yet", accounting.pending),
    ]


def _show_continuity(console: Console, continuity: Sequence[PromptKinds]) -> None:
    """Show how prompts began: in all, and in the rollouts that branched most."""
    # A conversation has to begin somewhere. Every other way of not continuing is a branch.
    unbranched = ("continued", "first_call", "new_conversation", "no_rollout")
    total = Counter[str]()
    for group in continuity:
        total.update({name: count * group.rollouts for name, count in group.kinds.items()})
    began = [("continued exactly", total.pop("continued", 0))]
    began += [(name.replace("_", " "), total.pop(name)) for name in unbranched if name in total]
    _print_table(console, ("prompts", ""), [*began, *_counted("branched: ", total)])
    branched: list[tuple[int, str, int, int, str]] = []
    for group in continuity:
        kinds = sorted(group.kinds.items())
        why = {name: count for name, count in kinds if name not in unbranched}
        listed = ", ".join(f"{name} {count}" for name, count in why.items())
        counts = (group.kinds["continued"], sum(why.values()), listed)
        branched += [(group.rollouts, group.example, *counts)] if why else []
    most = sorted(branched, key=lambda row: -row[3])
    if most:
        header = ("rollouts", "for instance", "continued", "branched", "why")
        _print_table(console, header, most[:_MOST_BRANCHED])
    if rest := sum(row[0] for row in most[_MOST_BRANCHED:]):
        console.print(f"and {rest} rollouts more that branched")


def _counted(prefix: str, counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Name each count, the largest first."""
    return [(f"{prefix}{name}", count) for name, count in Counter(counts).most_common()]


def _print_table(
    console: Console, header: Sequence[str], rows: Iterable[Sequence[str | int]]
) -> None:
    table = Table(box=None)
    for name in header:
        table.add_column(name, overflow="fold", no_wrap=name != header[-1])
    for row in rows:
        table.add_row(*map(str, row))
    print_block(table, console)
