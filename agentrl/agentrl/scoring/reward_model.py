"""A trained reward model as a reward: ``rewards = ["model:RUN"]``.

It scores conversations as it was trained on them: rendered by the chat template, up to the end of
the last answer. Loads torch and the weights at the first score.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import recorded
from agentrl.datasets.chats import to_chat
from agentrl.history.export import chat_of
from agentrl.runs.folder import find_adapters, run_and_step
from agentrl_trainer.models.saved_lora import is_reward_model

if TYPE_CHECKING:
    from agentrl.scoring.functions import ScoringContext
    from agentrl.scoring.trace import Trace
    from agentrl_proxy.rendering.renderer import Renderer
    from agentrl_trainer.learner.learner import Learner

_NAME = "reward"


class RewardModel:
    """Scores rollouts; from any thread.

    Args:
        folder: of a run (its best adapter, else its newest), ``RUN@STEP``, or a PEFT folder.

    Raises:
        ConfigError: there is no reward model.
    """

    compares_group = True
    """A group's members, which share their prompt, are scored together; none changes another's
    score."""

    def __init__(self, folder: str | Path) -> None:
        run, step = run_and_step(folder)
        best = run.best_adapter.is_dir() and not step
        found = find_adapters(f"{folder}@best" if best else folder, "rewards")
        self.adapter = next(iter(found.values())).absolute()
        if not is_reward_model(self.adapter):
            raise ConfigError(
                f"rewards: {str(folder)!r} is an adapter that writes answers, and no reward model; "
                "`agentrl reward-model` trains one"
            )
        settings = run.read_config() if run.config.is_file() else {}
        names = ("dtype", "trust_remote_code", "chat_template")
        options = {name: recorded(settings, f"model.{name}") for name in names}
        self._options = {name: value for name, value in options.items() if value is not None}
        self._lock = threading.Lock()
        self._context: ScoringContext | None = None

    @property
    def takes_cores(self) -> bool:
        """Whether its weights are on the CPU."""
        from agentrl_trainer.models.devices import default_device

        return default_device().type == "cpu"

    def connect(self, context: ScoringContext) -> None:
        self._context = context

    def __call__(self, traces: Sequence[Trace]) -> list[float | None]:
        """Score rollouts; None for one that cannot be rendered, which is noted once by reason."""
        from agentrl_trainer.learner.reward_head import score_row

        with self._lock:
            tokens = [self._tokens(trace) for trace in traces]
            rows = self._loaded[0].forward([score_row(one, _NAME) for one in tokens if one])
        scores = iter(rows)
        return [next(scores)[-1] if one else None for one in tokens]

    def _tokens(self, trace: Trace) -> list[int]:
        """Return a conversation's tokens, none if it has no score."""
        from agentrl.datasets.rendering import chat_rows

        last, tools = None, None
        for call in trace.calls:
            chat = chat_of(call) or {}
            if chat.get("messages") == trace.messages:
                last, tools = call, chat.get("tools")
        learner, renderer = self._loaded
        try:
            read = to_chat({"messages": trace.messages, "tools": tools})
            if read.messages[-1]["role"] != "assistant":
                raise ValueError("its last message is no answer")
            tokens = chat_rows(renderer, read, "last")[-1].tokens
            cut_off = last is not None and last.finish_reason == "length"
            if cut_off and renderer.is_stop(tokens[-1]):
                tokens = tokens[:-1]  # as such answers were recorded, and learned
            if len(tokens) > (most := learner.base.context_length):
                raise ValueError(f"it is longer than {most:,} tokens")
        except ValueError as error:
            said = f"rewards: {self.adapter.name} cannot score {trace.rollout_id}: {error}"
            if self._context is not None:
                self._context.note_once(f"{self.adapter} {error}", said)
            return []
        return tokens

    @cached_property
    def _loaded(self) -> tuple[Learner, Renderer]:
        import torch

        from agentrl_proxy.rendering.renderer import Renderer
        from agentrl_trainer.learner.learner import Learner
        from agentrl_trainer.models.loading import load_base
        from agentrl_trainer.models.lora import load_adapter_weights, read_reward_head
        from agentrl_trainer.models.saved_lora import read_lora

        lora = read_lora(self.adapter, scores=True)
        base = load_base(str(lora.base), **self._options)
        how: dict[str, Any] = {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.targets}
        learner = Learner(base, adapters=(_NAME,), score=True, **how)
        load_adapter_weights(learner.model, _NAME, self.adapter)
        with torch.no_grad():
            learner.reward_heads[_NAME].score.weight.copy_(read_reward_head(self.adapter))
        return learner, Renderer(base.tokenizer)
