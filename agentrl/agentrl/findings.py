"""Find what is wrong with the answers and rewards of rollouts, and say what helps.

In one place, because ``agentrl check`` prints it before a training and ``agentrl train`` after its
steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentrl_proxy.rendering.templates import THINKING_SWITCHES
from agentrl_tracer.schemas import Call, CallState

if TYPE_CHECKING:
    from agentrl_proxy.rendering.renderer import Renderer

CUT_OFF_FROM = 0.1
"""A few long answers are what sampling brings. An answer that is cut off has rarely said its
result, so from here on a tenth of the rollouts are judged by their length."""
EQUAL_FROM = 0.5
"""From here on more of a step's rollouts are thrown away than learned from."""
THINKING_FROM = 0.5
"""Most answers: then reasoning decides how long rollouts take."""
_WORSE_BY, _AGAIN_AFTER = 0.2, 25

MORE_SIGNAL = (
    "reward parts of the result, choose easier tasks, sample more per task (--group-size) or at a "
    "higher temperature, or train on supervised examples first (examples/recipes/sft.py)"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact, and what to do where it is a problem."""

    fact: str
    fix: str = ""
    """Empty: nothing is wrong."""
    share: float = 0.0
    """Of the answers or groups that the fact is about, those that have it."""

    def __str__(self) -> str:
        return f"{self.fact}: {self.fix}" if self.fix else self.fact


def answered(calls: Iterable[Call]) -> list[Call]:
    """Return the calls that a model with known tokens has answered."""
    return [call for call in calls if call.state is CallState.COMPLETED and call.response_ids]


def cut_off(calls: Sequence[Call], max_tokens: int) -> Finding:
    """Count the answers that ended at their token limit.

    Args:
        calls: answered ones.
        max_tokens: the setting.
    """
    limits = Counter(c.params.get("max_tokens") for c in calls if c.finish_reason == "length")
    count, share = limits.total(), limits.total() / max(len(calls), 1)
    if not count:
        return Finding(f"no answer was cut off at max_tokens {max_tokens}")
    at, frequent = limits.most_common(1)[0]
    if frequent < 0.9 * count:
        at = "limits of the agent or the context"
        fix = "raise what the agent requests, or shorten its prompts"
    else:
        where = "--max-tokens, or " if at == max_tokens else ""
        at, fix = f"max_tokens {at}", f"raise {where}what the agent requests"
    fix += "; an answer without its end seldom earns what it deserves"
    fact = f"{count} of {len(calls)} answers were cut off at {at}"
    return Finding(fact, fix if share >= CUT_OFF_FROM else "", share)


def equal_rewards(groups: Sequence[Sequence[float]], success: float) -> Finding:
    """Count the groups of rollouts that all earned the same.

    Args:
        groups: rewards of each, at least two.
        success: the reward from which a rollout has succeeded.
    """
    same = Counter(rewards[0] for rewards in groups if len(set(rewards)) == 1)
    if not same:
        return Finding(f"all {len(groups)} groups had different rewards")
    values = ", ".join(f"{count} of them {value:g}" for value, count in same.most_common(2))
    fact = f"{same.total()} of {len(groups)} groups had equal rewards ({values})"
    solved = sum(count for value, count in same.items() if value >= success)
    share = same.total() / len(groups)
    helps = "choose harder tasks, or end here" if 2 * solved > same.total() else MORE_SIGNAL
    fix = f"they teach nothing; {helps}" if share >= EQUAL_FROM else ""
    return Finding(fact, fix, share)


# ---- thinking


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model's chat template and answers show reasoning."""

    opens: int
    """The token that begins a thought."""
    closes: int
    switch: str | None
    """The template's variable that turns it on and off."""
    by_default: bool | None
    """Whether the template turns it on by itself; None: it says nothing, the model decides."""

    @classmethod
    def of(cls, renderer: Renderer) -> Thinking | None:
        """Read a template; None where a thought has no tokens of its own: the model has none."""
        marks = [renderer.encode(mark) for mark in renderer.reasoning_marks or ()]
        if [len(ids) for ids in marks] != [1, 1]:
            return None
        opens, closes = marks_of = marks[0][0], marks[1][0]
        asked = [{"role": "user", "content": "x"}]
        switch = next((name for name in THINKING_SWITCHES if name in renderer.switches), None)
        written = [one for one in renderer.encode(renderer.generation_prompt) if one in marks_of]
        by_default = written[-1] == opens if written else None
        if switch is not None:
            off = renderer.with_switches(False, None, {})
            by_default = renderer.text(asked, None) != off.text(asked, None)
        return cls(opens, closes, switch, by_default)

    def tokens(self, call: Call) -> int:
        """Count the tokens of an answer that are reasoning. The prompt may have opened it."""
        before = call.prompt_ids[-8:]
        ids = [*before, *call.response_ids]
        count = end = 0
        while self.opens in ids[end:]:
            begin = ids.index(self.opens, end)
            closed = self.closes in ids[begin:]
            end = ids.index(self.closes, begin) if closed else len(ids)
            count += max(0, end - max(begin, len(before)))
        return count

    def finding(self, calls: Sequence[Call], *, wanted: bool | None) -> Finding:
        """Say how much of the answers is reasoning.

        Args:
            calls: answered ones.
            wanted: the setting ``sampler.thinking``. What was asked for is no problem.
        """
        thoughts = [count for call in calls if (count := self.tokens(call))]
        if not thoughts:
            return Finding("no answer contains reasoning")
        share = len(thoughts) / len(calls)
        part = sum(thoughts) / sum(len(call.response_ids) for call in calls)
        fact = (
            f"thinking is on: {len(thoughts)} of {len(calls)} answers contain reasoning, "
            f"{part:.0%} of all sampled tokens"
        )
        fix = "give it room (--max-tokens), or choose a model that answers at once"
        if self.switch is not None:
            fix = "--sampler.thinking false makes answers short; true says that you want it so"
        return Finding(fact, "" if wanted or share < THINKING_FROM else fix, share)


# ---- during a training


@dataclass
class StepNotes:
    """Tells the problems of steps: each when it is first there, and again when it has got clearly
    worse, or after many steps."""

    note: Callable[[str], object]
    tokenizer: Any = None
    """Of the base model."""
    _told: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    @cached_property
    def thinking(self) -> Thinking | None:
        from agentrl_proxy.rendering.renderer import Renderer

        return Thinking.of(Renderer(self.tokenizer))

    def take(self, step: int, found: Mapping[str, Finding]) -> None:
        """Tell what is due of a step's findings, by kind."""
        for kind, one in found.items():
            told, share = self._told.get(kind, (step - _AGAIN_AFTER, 0.0))
            due = step - told >= _AGAIN_AFTER or one.share >= share + _WORSE_BY
            if one.fix and due:
                self._told[kind] = step, one.share
                self.note(f"step {step}: {one}")
