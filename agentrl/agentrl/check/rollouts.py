"""Say how many calls and tokens the rollouts took, and whether calls continue each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from agentrl.findings import Finding, answered, cut_off
from agentrl_proxy.rendering.continuity import Branch
from agentrl_tracer.schemas import Call, SkipReason
from agentrl_trainer.data.skip_reasons import SkipRules
from agentrl_trainer.data.trajectories import Trajectory, TrajectorySet, build_trajectories

_BEGINS = (Branch.NO_ROLLOUT, Branch.FIRST_CALL, Branch.NEW_CONVERSATION)
_WHY = {
    Branch.TOOLS_CHANGED: "the agent sent other tools than before",
    Branch.SWITCHES_CHANGED: "the agent turned a switch of the template, as thinking",
    Branch.MODEL_CHANGED: "another adapter replied",
    Branch.HISTORY_EDITED: "the agent sent an earlier message otherwise than it was",
    Branch.THINKING_STRIPPED: "the template or the agent left out earlier reasoning",
    Branch.TEMPLATE_REWRITES: "the template writes an earlier message differently",
}


def call_findings(calls: Sequence[Call], rollouts: int) -> Iterator[Finding]:
    """Say how many calls a rollout makes, and how they continue.

    Args:
        calls: of the winning attempts.
        rollouts: how many these are.
    """
    mine = answered(calls)
    others = sum(not call.prompt_ids for call in calls)
    if not mine:
        asked = ", ".join(sorted({call.model for call in calls})) or "no model"
        yield Finding(
            f"none in {rollouts} rollouts: they asked {asked}",
            "the model in training is at OPENAI_BASE_URL, named AGENTRL_MODEL",
        )
        return
    of_rollout = Counter(call.rollout_id for call in mine)
    counts = [of_rollout.get(one, 0) for one in of_rollout] + [0] * (rollouts - len(of_rollout))
    spread = f" ({min(counts)} to {max(counts)})" if min(counts) < max(counts) else ""
    yield Finding(f"{fmean(counts):.3g} a rollout{spread}")
    if others:
        yield Finding(f"{others} more were answered by other models, and do not train")
    began = Counter(call.params.get("branched") for call in mine if call.choice == 0)
    branched = {why: began[why] for why in _WHY if began[why]}
    later = sum(began.values()) - sum(began[why] for why in _BEGINS)
    if later:
        yield Finding(
            f"{began[None]} of {later} later calls continue the one before, token for token"
        )
    for why, count in branched.items():
        how = "each trains as a row of its own, which is right, and takes longer"
        yield Finding(f"{count} do not, because {_WHY[why]} ({why}); {how}")


def trajectories_of(calls: Sequence[Call], adapter: str, max_length: int) -> TrajectorySet:
    """Cut each attempt's calls into trajectories, as if ``adapter`` had answered them."""
    by_attempt: dict[str | None, list[Call]] = {}
    for call in answered(calls):
        if call.prompt_ids:
            known = replace(call, adapter=adapter, adapter_version=0, skip_reason=None)
            by_attempt.setdefault(call.attempt_id, []).append(known)
    found: list[Trajectory] = []
    skipped: dict[str, SkipReason] = {}
    for mine in by_attempt.values():
        some = build_trajectories(mine, SkipRules(max_length=max_length))
        found += some.trajectories
        skipped |= some.skipped
    return TrajectorySet(found, skipped)


def token_findings(
    calls: Sequence[Call],
    cut: TrajectorySet,
    rollouts: int,
    *,
    max_tokens: int,
    max_length: int,
) -> Iterator[Finding]:
    """Say how long prompts, answers and trajectories are, and what was cut off or is too long."""
    mine = answered(calls)
    if not mine:
        return
    sampled = sum(len(call.response_ids) for call in mine)
    prompt = fmean(len(call.prompt_ids) for call in mine)
    yield Finding(
        f"a prompt has {prompt:.0f}, an answer {sampled / len(mine):.0f}; a rollout samples "
        f"{sampled / rollouts:.0f}"
    )
    longest = max((len(path.tokens) for path in cut.trajectories), default=0)
    too_long = list(cut.skipped.values()).count(SkipReason.TOO_LONG)
    yield Finding(
        f"the longest trajectory has {longest} of at most {max_length}"
        + (f"; {too_long} calls are longer and would not train" if too_long else ""),
        "raise learning.max_length, or shorten the agent's prompts" if too_long else "",
    )
    yield cut_off(mine, max_tokens)
