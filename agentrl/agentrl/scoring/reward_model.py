"""A trained reward model as a reward: ``rewards = ["model:NAME"]``.

It scores conversations as it was trained on them: rendered by the chat template, up to the end of
the last answer. Loads torch and the weights at the first score.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import recorded
from agentrl.datasets.chats import to_chat
from agentrl.history.export import chat_of
from agentrl.runs.folder import find_adapters, is_reward_model, run_and_step
from agentrl_tracer.schemas import Json

if TYPE_CHECKING:
    from agentrl.scoring.functions import ScoringContext
    from agentrl.scoring.trace import Trace
    from agentrl_proxy.rendering.renderer import Renderer
    from agentrl_trainer.learner.learner import Learner

_NAME = "reward"


def load_reward_model(name: str) -> RewardModel:
    """Return the reward model of a run: its folder, ``RUN@STEP``, or its name below ``runs/``.

    Raises:
        ConfigError: there is none.
    """
    source = name if run_and_step(name)[0].root.is_dir() else str(Path("runs", name))
    return RewardModel(source)


class RewardModel:
    """Scores conversations, many at once; from any thread.

    Args:
        folder: of a run (its best adapter, else its newest), ``RUN@STEP``, or a PEFT folder.

    Raises:
        ConfigError: there is no reward model.
    """

    compares_group = True
    """A group's members, which share their prompt, are scored together; none changes another's
    score."""

    def __init__(self, folder: str | Path, device: str = "auto") -> None:
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
        self._options: Json = {"device": device}
        for option in ("dtype", "trust_remote_code", "chat_template"):
            if (value := recorded(settings, f"model.{option}")) is not None:
                self._options[option] = value
        self._lock = threading.Lock()
        self._note: Callable[[str], object] = print
        self._noted: set[str] = set()

    def connect(self, context: ScoringContext) -> None:
        self._note = context.note

    def score(self, chats: Sequence[list[Json]]) -> list[float]:
        """Score conversations in OpenAI's form, whose last message is the assistant's.

        Raises:
            ValueError: one of them cannot be rendered, or is too long for the model.
        """
        with self._lock:
            return self._scores([self._tokens({"messages": messages}) for messages in chats])

    def __call__(self, traces: Sequence[Trace]) -> list[float | None]:
        """Score rollouts; None for one that cannot be rendered, which is noted once by reason."""
        with self._lock:
            found = [self._tokens_of(trace) for trace in traces]
            scores = iter(self._scores([tokens for tokens in found if tokens]))
            return [next(scores) if tokens else None for tokens in found]

    def _tokens_of(self, trace: Trace) -> list[int] | None:
        chats = (chat for call in reversed(trace.calls) if (chat := chat_of(call)))
        tools = next((chat["tools"] for chat in chats if chat.get("tools")), None)
        try:
            return self._tokens({"messages": trace.messages, "tools": tools})
        except ValueError as error:
            if (why := str(error)) not in self._noted:
                self._noted.add(why)
                self._note(f"rewards: {self.adapter.name} cannot score {trace.rollout_id}: {why}")
            return None

    def _tokens(self, chat: Json) -> list[int]:
        from agentrl.datasets.rendering import chat_rows

        read = to_chat(chat)
        if read.messages[-1]["role"] != "assistant":
            raise ValueError("its last message is no answer")
        tokens = chat_rows(self._renderer, read, "last")[-1].tokens
        if len(tokens) > (most := self._learner.base.context_length):
            raise ValueError(f"it is longer than {most:,} tokens")
        return tokens

    def _scores(self, rows: Sequence[list[int]]) -> list[float]:
        from agentrl_trainer.learner.reward_head import score_row

        found = self._learner.forward([score_row(tokens, _NAME) for tokens in rows])
        return [row[-1] for row in found]

    @cached_property
    def _renderer(self) -> Renderer:
        from agentrl_proxy.rendering.renderer import Renderer

        return Renderer(self._learner.base.tokenizer)

    @cached_property
    def _learner(self) -> Learner:
        import torch

        from agentrl_trainer.learner.learner import Learner
        from agentrl_trainer.models.loading import load_base
        from agentrl_trainer.models.lora import load_adapter_weights, read_reward_head

        config: dict[str, Any] = json.loads((self.adapter / "adapter_config.json").read_text())
        base = load_base(config["base_model_name_or_path"], **self._options)
        experts = [one.removesuffix(".weight") for one in config.get("target_parameters") or []]
        targets = sorted({*(config["target_modules"] or []), *experts})
        lora = {"rank": config["r"], "alpha": config["lora_alpha"], "targets": targets}
        learner = Learner(base, adapters=(_NAME,), score=True, **lora)
        load_adapter_weights(learner.model, _NAME, self.adapter)
        with torch.no_grad():
            learner.reward_heads[_NAME].score.weight.copy_(read_reward_head(self.adapter))
        return learner
