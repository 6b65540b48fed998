"""Say that rollouts earned a reward without asking the model, and why, as far as spans tell.

Such a rollout has no token to train on. Its reward is left out of its group's comparison
(``agentrl_trainer.data.adapter_split``) and of the step's mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentrl_tracer.schemas import Rollout, Span

if TYPE_CHECKING:
    from agentrl.training.run import TrainingRun

_EXAMINED = 16  # rollouts at most, for their spans
_MODEL_CALLS = ("chat", "text_completion", "generate_content")  # gen_ai.operation.name


def note_unasked(run: TrainingRun, rollouts: Sequence[Rollout], total: int, what: str) -> None:
    """Report ``rollouts``, of ``total``, that earned a reward without asking the model."""
    if not rollouts:
        return
    examined, gateways = rollouts[:_EXAMINED], run.session.gateways.urls
    models = {
        call.attempt_id: call.model
        for call in run.store.calls(attempt_ids=[one.winner for one in examined if one.winner])
    }
    reasons: Counter[str] = Counter()
    for rollout in examined:
        other = models.get(rollout.winner)
        spans = [s for s in run.store.spans(rollout.id) if s.attempt_id == rollout.winner]
        why = f"they asked {other}, which does not train" if other else _why(spans, gateways)
        reasons.update([why] if why else [])
    known = "; ".join(f"{why} ({count})" for why, count in reasons.most_common())
    reason = f": {known}" if known else ""
    run.display.note(
        f"{len(rollouts)} of {total} {what} earned a reward without asking the model{reason}"
    )


def _why(spans: Sequence[Span], gateways: Sequence[str]) -> str | None:
    """Say why an attempt's calls did not reach the gateway; None if its spans do not tell."""
    calls = [s for s in spans if s.attributes.get("gen_ai.operation.name") in _MODEL_CALLS]
    ours = {getattr(urlsplit(url), part) for url in gateways for part in ("hostname", "port")}
    for span in calls:
        address, port = (span.attributes.get(f"server.{part}") for part in ("address", "port"))
        if address and ours.isdisjoint((address, port)):
            return f"they asked {address}{f':{port}' if port else ''}, not OPENAI_BASE_URL"
    for span in calls:
        if span.status == "error":
            return f"their calls failed: {span.attributes.get('error.type', 'see runs rollout')}"
    return "their framework answered from a cache" if calls else None
