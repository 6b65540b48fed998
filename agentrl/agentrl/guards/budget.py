"""What a run may spend, in hours, tokens and dollars, and what it has spent, resumes included.

Before each step the run asks whether one more fits (``why_no_step``). A step or an evaluation that
takes more than any before is given up where the limit is reached (``watch``). ``spent.json`` in
the run's folder is written every minute, and after each step and evaluation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass
from math import inf
from typing import Any

from agentrl.config.settings.run import GuardSettings
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Call, Purpose, RolloutState
from agentrl_tracer.store import Store

_SETTINGS = {"hours": "max_hours", "tokens": "max_run_tokens", "dollars": "max_cost"}
_LOOK_S = 1.0  # between looks at the clock
_REST = 50  # times as long as a look at the calls took
_WRITE_S = 60.0


@dataclass(frozen=True, slots=True)
class Spent:
    hours: float = 0.0
    tokens: float = 0.0
    dollars: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class BudgetSpentError(Exception):
    """The rollouts under way exceed a limit. ``args``: its setting, and a sentence."""


class Budget:
    """The budget of one run.

    Args:
        started: when this process began, by ``time.perf_counter``.
        ahead: steps that rollouts may run ahead.
        note: receives what the user should know.
    """

    def __init__(
        self,
        settings: GuardSettings,
        folder: RunFolder,
        store: Store,
        run_id: str,
        *,
        started: float,
        ahead: int,
        note: Callable[[str], None],
    ) -> None:
        limits: dict[str, Any] = {unit: getattr(settings, n) for unit, n in _SETTINGS.items()}
        self._limits: dict[str, float] = {unit: n for unit, n in limits.items() if n is not None}
        self._folder, self._store, self._run_id = folder, store, run_id
        self._started, self._ahead, self._note = started, ahead, note
        known = json.loads(folder.spent.read_text()) if folder.spent.is_file() else {}
        self._spent = Spent(**known)  # hours: those before this process
        self._settled = {Purpose.TRAIN: 0, Purpose.EVAL: -1}
        """The last step whose calls are in ``_spent``."""
        self._mark = self.spent()
        self._last = {Purpose.TRAIN: Spent(), Purpose.EVAL: Spent()}
        """What the last step, and the last evaluation, took."""
        self._next_look = self._next_write = 0.0
        self._told_unpriced = self._ended = False

    def spent(self) -> Spent:
        """Return the hours, tokens and dollars that the run has spent."""
        return self._spent + Spent(hours=(time.perf_counter() - self._started) / 3600)

    def begin(self, step: int, *, evaluated: bool) -> None:
        """Count from ``step``, which was trained before."""
        self._mark = self.spent()
        made = self._store.rollouts(self._run_id, step=step) if step and self._limits else []
        kept = [rollout for rollout in made if rollout.state is not RolloutState.CANCELLED]
        for purpose, spent in self._last.items():
            ids = [rollout.id for rollout in kept if rollout.purpose is purpose]
            calls = self._store.calls(rollout_ids=ids, bodies=False) if ids else []
            self._last[purpose] = spent + self._used(calls)  # the hours are not known
        self._settled = {Purpose.TRAIN: step, Purpose.EVAL: step if evaluated else step - 1}

    def settle(
        self, purpose: Purpose, step: int, calls: Iterable[Call], dollars: float = 0.0
    ) -> None:
        """Add the calls of a finished step or evaluation, and other ``dollars`` spent with it."""
        self._settled[purpose] = step
        self._spent += self._used(calls) + Spent(dollars=dollars)
        now = self.spent()
        self._last[purpose] = now - self._mark
        self._mark = now
        self._write(now)

    def why_no_step(self) -> tuple[str, str] | None:
        """Tell which limit one more step, and its evaluation, would exceed, if they take what the
        last ones took: the limit's setting and a sentence. None: they fit."""
        expected = asdict(self._last[Purpose.TRAIN] + self._last[Purpose.EVAL])
        spent = asdict(self.spent())
        for unit, limit in self._limits.items():
            if spent[unit] + expected[unit] > limit:
                return f"guards.{_SETTINGS[unit]}", (
                    f"{_shown(spent[unit])} of {_shown(limit)} {unit} are spent, and one more step "
                    f"may take {_shown(expected[unit])}"
                )
        return None

    def watch(self) -> None:
        """Look, now and then, at what is spent. Cheap: call it while rollouts run.

        Raises:
            BudgetSpentError: a limit is exceeded.
        """
        began = time.monotonic()
        if began < self._next_look:
            return
        late = self.spent().hours > self._limits.get("hours", inf)
        counts = late or self._limits.keys() - {"hours"}
        under_way = self._used(self._under_way()) if counts else Spent()
        spent = self.spent() + under_way
        took = time.monotonic() - began
        self._next_look = began + max(_LOOK_S, _REST * took)
        if began >= self._next_write:
            self._write(spent)
        for unit, limit in self._limits.items():
            if getattr(spent, unit) > limit:
                self.end()
                raise BudgetSpentError(
                    f"guards.{_SETTINGS[unit]}",
                    f"{_shown(limit)} {unit} are spent; the rollouts under way were given up",
                )

    def end(self) -> None:
        """Count the rollouts under way, which no step will settle. Call it before they are
        canceled; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self._spent += self._used(self._under_way())
            self._write(self.spent())

    def _under_way(self) -> list[Call]:
        first = self._settled[Purpose.TRAIN]
        ids = [
            rollout.id
            for step in range(first, first + 2 + self._ahead)
            for rollout in self._store.rollouts(self._run_id, step=step)
            if step > self._settled[rollout.purpose] and rollout.state is not RolloutState.CANCELLED
        ]
        return self._store.calls(rollout_ids=ids, bodies=False) if ids else []

    def _used(self, calls: Iterable[Call]) -> Spent:
        """Count what calls have used; choices that were sampled together share their prompt."""
        tokens, dollars, prompts = 0, 0.0, set[tuple[str | None, int]]()
        for call in calls:
            first = (call.attempt_id, call.seq) not in prompts
            prompts.add((call.attempt_id, call.seq))
            tokens += len(call.response_ids) + first * len(call.prompt_ids)
            cost: float = call.params.get("cost") or 0.0
            dollars += first * cost
            if "usage" in call.params and not cost:
                self._tell_unpriced(call.model)
        return Spent(tokens=tokens, dollars=dollars)

    def _tell_unpriced(self, model: str) -> None:
        if "dollars" in self._limits and not self._told_unpriced:
            self._told_unpriced = True
            self._note(
                f"guards.max_cost: LiteLLM knows no price of {model!r}, so its calls count as 0 "
                f"dollars; give models.{model}.params input_cost_per_token and "
                "output_cost_per_token"
            )

    def _write(self, spent: Spent) -> None:
        self._next_write = time.monotonic() + _WRITE_S
        self._folder.write_json(self._folder.spent, asdict(spent))


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
