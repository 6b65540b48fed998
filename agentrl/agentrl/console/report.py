"""What is printed when a command is done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentrl.console.live import sparkline
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl_tracer.schemas import Accounting, Json, Outcomes, SkipReason

if TYPE_CHECKING:
    from agentrl.runs.summary import Summary


def training_report(summary: Summary) -> Panel:
    """The end of a training run: replies before and after, the figures, where things are."""
    replies = Table(box=None, padding=(0, 2), show_edge=False)
    replies.add_column("held-out prompt", style="dim")
    replies.add_column("before")
    replies.add_column("after", style="green")
    for reply in summary.replies:
        replies.add_row(Text(reply.prompt), Text(reply.before), Text(reply.after))

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    if summary.learned_nothing:
        for why in _why_nothing_trained(summary.accounting):
            facts.add_row("[red]not trained[/]", why)
    rewards = [reward for reward in summary.rewards if reward is not None]
    change = f"{rewards[0]:+.2f} → [b]{rewards[-1]:+.2f}[/]" if rewards else "there was none"
    facts.add_row("mean reward", f"{change} in {summary.steps} steps")
    if summary.held_out:
        first, last = summary.held_out[0][1], summary.held_out[-1][1]
        facts.add_row("held-out accuracy", f"{first:.0%} → [b]{last:.0%}[/]")
    total = sum(summary.seconds.values())
    split = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.seconds.items())
    facts.add_row("time", f"{total:.0f} s: {split}")
    facts.add_row("learning curve", shown(summary.folder.picture))
    facts.add_row("adapter", shown(summary.adapter))
    if summary.learned_nothing:
        title = f"[b]nothing was learned: 0 of {_trainable(summary.accounting)} calls trained[/]"
        return Panel(facts, title=title, title_align="left", border_style="red")
    parts = [replies, Text(), facts] if summary.replies else [facts]
    return Panel(Group(*parts), title="[b]trained[/]", title_align="left", border_style="green")


_WHAT_HELPS: dict[str, str] = {
    SkipReason.NO_REWARD: "their rollouts emitted no reward: return a number, or call emit_reward",
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
    SkipReason.NON_FINITE_STEP: "the loss or gradient was not finite: lower the learning rate",
}


def _why_nothing_trained(accounting: Accounting) -> list[str]:
    """Each reason with its count, the most frequent first."""
    if not _trainable(accounting):
        return ["the agent did not ask the model: it is at OPENAI_BASE_URL, named AGENTRL_MODEL"]
    counts = {k: n for k, n in accounting.skipped.items() if k != SkipReason.EVALUATION}
    return [
        f"{count} {reason}" + (f": {_WHAT_HELPS[reason]}" if reason in _WHAT_HELPS else "")
        for reason, count in sorted(counts.items(), key=lambda item: -item[1])
    ]


def _trainable(accounting: Accounting) -> int:
    """Calls that were made to be learned from."""
    return accounting.recorded - accounting.skipped.get(SkipReason.EVALUATION, 0)


def serve_command(summary: Summary, model: str, *, trust_remote_code: bool) -> str:
    """The one line that serves what was trained."""
    flags = "" if model == "agentrl-tiny" else f" --model {model}"
    flags += " --trust-remote-code" if trust_remote_code else ""
    return f"agentrl serve --adapter-path {shown(summary.adapter)}{flags}"


def shown(path: Path) -> str:
    """A path as people want to read and copy it: from here, if it is below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def runs_table(runs: Sequence[Json], metrics: Sequence[dict[int, dict[str, float]]]) -> Table:
    """One row per run."""
    table = Table("name", "kind", "state", "started", "steps", "mean reward", "held-out", box=None)
    for run, rows in zip(runs, metrics, strict=True):
        rewards = _series(rows, REWARD)
        held_out = _series(rows, HELD_OUT)
        table.add_row(
            run["name"],
            run["kind"],
            run["state"],
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run["created_at"])),
            str(max(rows, default=0)),
            f"{rewards[-1]:+.3f} {sparkline(rewards[-24:])}" if rewards else "–",
            f"{held_out[-1]:.0%}" if held_out else "–",
        )
    return table


def show_run(
    console: Console,
    run: Json,
    metrics: dict[int, dict[str, float]],
    accounting: Accounting,
    outcomes: Outcomes,
    continuity: Mapping[str, Mapping[str, int]],
) -> None:
    """One run: steps, how rollouts ended, where calls went, and how their prompts began.

    Args:
        continuity: of each rollout, see ``CallStore.continuity``.
    """
    console.print(f"[b]{run['name']}[/] ({run['kind']}, {run['state']})")
    steps = Table("step", "mean reward", "held-out", "calls", "trained", "groups used", box=None)
    for step, row in metrics.items():
        steps.add_row(
            str(step),
            *(
                f"{row[name]:{form}}" if name in row else ""
                for name, form in (
                    (REWARD, "+.3f"),
                    (HELD_OUT, ".0%"),
                    ("calls", ".0f"),
                    ("calls/trained", ".0f"),
                    ("groups/used", ".0f"),
                )
            ),
        )
    console.print(steps)
    ends = Table("ended", "", box=None)
    for kind, counts in (
        ("rollouts", outcomes.rollouts),
        ("attempts", outcomes.attempts),
        ("rewards by policy", outcomes.policy_rewards),
    ):
        for name, count in sorted(counts.items(), key=lambda item: -item[1]):
            ends.add_row(f"{kind}: {name}", str(count))
    policies = ", ".join(f"{name} {value}" for name, value in run["policies"].items())
    ends.add_row("[dim]policies[/]", f"[dim]{policies}[/]")
    console.print(ends)
    sums = Table("calls", "", box=None)
    sums.add_row("proxied", str(accounting.proxied))
    sums.add_row("recorded", str(accounting.recorded))
    sums.add_row("trained", str(accounting.trained))
    for reason, count in sorted(accounting.skipped.items(), key=lambda item: -item[1]):
        sums.add_row(f"skipped: {reason}", str(count))
    sums.add_row("not judged yet", str(accounting.pending))
    sums.add_row("adds up", "[green]yes[/]" if accounting.adds_up else "[red]no[/]")
    console.print(sums)
    if continuity:
        _show_continuity(console, continuity)


# A conversation has to begin somewhere. Every other way of not continuing is a branch.
_BEGINNINGS = ("first_call", "new_conversation", "no_rollout")
_MOST_BRANCHED = 20


def _show_continuity(console: Console, continuity: Mapping[str, Mapping[str, int]]) -> None:
    """How prompts began: in all, and in the rollouts that branched most."""
    total = Counter[str]()
    for counts in continuity.values():
        total.update(counts)
    table = Table("prompts", "", box=None)
    table.add_row("continued exactly", str(total.pop("continued", 0)))
    for name in _BEGINNINGS:
        if name in total:
            table.add_row(name.replace("_", " "), str(total.pop(name)))
    for name, count in total.most_common():
        table.add_row(f"branched: {name}", str(count))
    console.print(table)
    branches = {
        rollout_id: {k: n for k, n in counts.items() if k not in (*_BEGINNINGS, "continued")}
        for rollout_id, counts in continuity.items()
    }
    branched = sorted(
        (i for i in branches if branches[i]), key=lambda i: -sum(branches[i].values())
    )
    if not branched:
        return
    rows = Table("rollout", "continued", "branched", "why", box=None)
    for rollout_id in branched[:_MOST_BRANCHED]:
        why = branches[rollout_id]
        rows.add_row(
            rollout_id,
            str(continuity[rollout_id].get("continued", 0)),
            str(sum(why.values())),
            ", ".join(f"{name} {count}" for name, count in sorted(why.items())),
        )
    console.print(rows)
    if len(branched) > _MOST_BRANCHED:
        console.print(f"and {len(branched) - _MOST_BRANCHED} rollouts more that branched")


def _series(rows: dict[int, dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows.values() if name in row]
