"""What is printed of a training run: where its calls went, and how it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from agentrl.console.output import whole
from agentrl.console.tables import NAME_WIDTH, facts
from agentrl.findings import WHERE_THE_MODEL_IS
from agentrl.runs.recorded import shown
from agentrl_tracer.schemas import REWARD_RANGE, Accounting, SkipReason

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.config.settings.models import ModelSettings
    from agentrl.runs.summary import Summary


def calls_line(a: Accounting) -> str:
    """Return where calls went as a sum, the most frequent reason to skip them first."""
    parts = [f"{a.trained} trained", *(f"{n} {why}" for why, n in Counter(a.skipped).most_common())]
    parts += [f"{a.pending} pending"] if a.pending else []
    sums = f"{a.proxied} proxied = {a.recorded} recorded = {' + '.join(parts)}"
    return f"{sums} {'✓ adds up' if a.adds_up else '✗ DOES NOT ADD UP'}"


def cores_line(busy: Mapping[str, float]) -> str:
    """Return the share of the cores that were busy in each phase."""
    return ", ".join(f"{phase} {share:.0%}" for phase, share in busy.items())


def training_report(summary: Summary) -> Group:
    """Show replies before and after, the figures, and where things are."""
    accounting = summary.accounting
    rewards = [reward for reward in summary.rewards if reward is not None]
    change = f"{rewards[0]:+.2f} → [b]{rewards[-1]:+.2f}[/]" if rewards else "there was none"
    steps = f"{summary.steps} step{'s' * (summary.steps != 1)}"
    rows: list[tuple[str, str | Text]] = [("mean reward", f"{change} in {steps}")]
    if summary.held_out:
        first, last = summary.held_out[0][1], summary.held_out[-1][1]
        rows.append(("held-out accuracy", f"{first:.0%} → [b]{last:.0%}[/]"))
    if (best := summary.best) is not None and best[0] != summary.held_out[-1][0]:
        rows.append(("best held-out", f"{best[1]:.0%} at step {best[0]}"))
    if summary.ended is not None:
        rows.append(("ended by", Text(f"{summary.ended.guard}: {summary.ended.sentence}")))
    split = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.seconds.items())
    rows.append(("time", f"{sum(summary.seconds.values()):.0f} s: {split}"))
    if summary.cores_busy:
        rows.append(("cores busy", cores_line(summary.cores_busy)))
    places = [
        whole((f"{name:<{NAME_WIDTH}}  ", "dim"), shown(path))
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
        said = [f"the agent did not ask the model: {WHERE_THE_MODEL_IS}"]
    else:
        said = [f"{n} {why}: {_WHAT_HELPS.get(why, '')}" for why, n in counts.most_common()]
    return [("[red]not trained[/]", one.removesuffix(": ")) for one in said]


def serve_command(adapter: Path, model: ModelSettings) -> str:
    """Return the one line that serves a trained adapter."""
    flags = "" if model.name == "agentrl-tiny" else f" --model {model.name}"
    flags += " --model.trust-remote-code" if model.trust_remote_code else ""
    flags += f" --model.chat-template {model.chat_template}" if model.chat_template else ""
    return f"agentrl serve --adapter-path {shown(adapter)}{flags}"
