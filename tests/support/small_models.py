"""Small random models, and requests to a sampler engine over them."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.inference import (
    Event,
    Finished,
    SampleParams,
    SamplerEngine,
    SampleRequest,
    Token,
)
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then <|end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )


def qwen3(layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=257, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, intermediate_size=96, max_position_embeddings=512,
            tie_word_embeddings=True, initializer_range=0.15,
        )
    ).eval()  # fmt: skip


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257, hidden_size=48, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=1, intermediate_size=96, max_position_embeddings=256,
            attention_bias=True, initializer_range=0.15,
        )
    ).eval()  # fmt: skip


def training_row(tokens: list[int], start: int = 1, credit: float = 1.0) -> TrainingRow:
    """A row that trains its tokens from ``start`` on."""
    size = len(tokens)
    return TrainingRow(tokens, [at >= start for at in range(size)], [0.0] * size, [credit] * size)


def lora_b_from(seed: int, model: torch.nn.Module) -> None:
    """Draw B, which begins at zero, where half of LoRA's gradients vanish and adapters agree."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)


def save_model(model: PreTrainedModel, folder: Path) -> str:
    """Write a model with the tokenizer, as people publish theirs."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def as_base(model: PreTrainedModel) -> BaseModel:
    return BaseModel(
        model=model,
        tokenizer=byte_tokenizer(),
        name="test-model",
        device=torch.device("cpu"),
        dtype=model.dtype,
        context_length=model.config.max_position_embeddings,
        eos_ids=frozenset({256}),
    )


def make_adapter(
    base: BaseModel, folder: Path, seed: int, targets: str | list[str] = "all-linear"
) -> PreTrainedModel:
    """Save a random adapter to ``folder``; returns a model of its own with it, for reference."""
    own = as_base(copy.deepcopy(base.model))
    own.model.set_attn_implementation("sdpa" if own.model._supports_sdpa else "eager")
    peft_model = attach_adapter(own, "policy", lora_config(4, 8, targets), seed)
    lora_b_from(seed, peft_model)
    save_adapter(peft_model, "policy", folder)
    return peft_model


class Answer:
    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.ends: list[Finished] = []

    @property
    def ids(self) -> list[int]:
        return [t.token_id for t in self.tokens]

    @property
    def end(self) -> Finished:
        (end,) = self.ends
        return end

    @property
    def versions(self) -> set[int | None]:
        return {t.adapter_version for t in self.tokens}


class Asked:
    """Collects the events of one request."""

    def __init__(
        self,
        engine: SamplerEngine,
        prompt: list[int],
        params: SampleParams,
        adapter: str | None = None,
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.answers = [Answer() for _ in range(params.n)]
        self.first = threading.Event()
        self._left = params.n
        self._done = threading.Event()
        self.cancel = engine.submit(SampleRequest(prompt, params, adapter, self._event))

    def _event(self, event: Event) -> None:
        answer = self.answers[event.index]
        assert not answer.ends, "an event after Finished"
        if isinstance(event, Token):
            answer.tokens.append(event)
            self.first.set()
            return
        answer.ends.append(event)
        self._left -= 1
        if not self._left:
            self._done.set()

    def wait(self) -> list[Answer]:
        assert self._done.wait(60), "no answer in 60 s"
        return self.answers

    def one(self) -> Answer:
        (answer,) = self.wait()
        return answer


@contextmanager
def running_engine(base: BaseModel, **options: Any) -> Iterator[SamplerEngine]:
    engine = SamplerEngine(base, **options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def worst_difference(model: PreTrainedModel, prompt: list[int], answer: Answer) -> float:
    """Largest difference between reported log-probs and those of a plain full forward."""
    ids = torch.tensor([prompt + answer.ids])
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    expected = logprobs[at, ids[0, len(prompt) :]]
    found = torch.tensor([t.logprob for t in answer.tokens])
    return float((expected - found).abs().max())


def settle(engine: SamplerEngine) -> None:
    """Wait for the end of the round: the last event comes before its sequence leaves."""
    deadline = time.monotonic() + 30
    while engine._scheduler.busy or any(not x.current for x in engine._scheduler.lanes):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.02)
