"""Pretrain ``agentrl-tiny``: write its tokenizer, template, weights and figures to a folder.

    python scripts/tiny_model/pretrain.py [--seed 0] [--chats 72000] [--out DIR]

Turn the chats of ``corpus`` into tokens, train a small Qwen3 on them (about ten minutes of one CPU
core), measure the result. The output is an ordinary model folder.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import corpus
import torch
import torch.nn.functional as F
from chat_tokenizer import END, END_OF_TEXT, render, save_tokenizer, train_tokenizer
from rich.progress import Progress
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from vocabulary import Chat

from agentrl_trainer.tiny import MODEL_DIR

# --- data ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """One chat as tokens, and how much predicting each of them counts."""

    ids: list[int]
    weights: list[float]


def encode(tokenizer: PreTrainedTokenizerFast, chat: Chat, prompt_weight: float) -> Example:
    """What the assistant says (``<|im_end|>`` included) counts 1, all else ``prompt_weight``."""
    ids: list[int] = []
    weights: list[float] = []
    done = ""

    def add(text: str, weight: float) -> None:
        nonlocal done
        assert text.startswith(done), "the template must preserve prefixes"
        piece = tokenizer(text[len(done) :]).input_ids
        ids.extend(piece)
        weights.extend([weight] * len(piece))
        done = text

    for k, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            add(render(tokenizer, chat.messages[:k], chat.tools, prompt=True), prompt_weight)
            add(render(tokenizer, chat.messages[: k + 1], chat.tools).removesuffix("\n"), 1.0)
    return Example(ids, weights)


def batches(examples: list[Example], size: int, short: float, rng: Random) -> list[list[Example]]:
    """Batches of about ``size`` tokens and of like length; the first ``short`` share is short."""
    examples = sorted(examples, key=lambda e: len(e.ids) + 8 * rng.random())
    made: list[list[Example]] = [[]]
    width = 0
    for example in examples:
        width = max(width, len(example.ids))
        if width * (len(made[-1]) + 1) > size:
            made.append([])
            width = len(example.ids)
        made[-1].append(example)
    half = made[: len(made) // 2]
    rng.shuffle(half)
    first = half[: int(short * len(made))]
    rest = half[len(first) :] + made[len(made) // 2 :]
    rng.shuffle(rest)
    return first + rest


def collate(batch: list[Example]) -> tuple[Tensor, Tensor]:
    width = max(len(example.ids) for example in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)  # <|endoftext|> is token 0
    weights = torch.zeros(len(batch), width)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weights[row, : len(example.ids)] = torch.tensor(example.weights)
    return ids, weights


# --- model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes the model; written into the log."""

    seed: int = 0
    chats: int = 72_000
    vocab_size: int = 2048
    hidden_size: int = 128
    layers: int = 3
    prompt_weight: float = 0.1
    batch_tokens: int = 2048
    short_share: float = 0.25
    muon_lr: float = 0.02
    adamw_lr: float = 4e-3
    warmup: float = 0.02
    decay: float = 0.4
    clip: float = 1.0


def build(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[END_OF_TEXT],
        dtype="float32",
    )
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(config)
    start_with_induction(model)
    return model


@torch.no_grad()
def start_with_induction(model: Qwen3ForCausalLM) -> None:
    """Heads of the first two layers begin as an induction circuit; training takes it from there.

    The residual stream is divided into one constant dimension, the token itself, and two slots. In
    layer 0, heads 0 and 1 attend one and two tokens back (by rotary phase alone) and write half of
    the token found there into the slots. In layer 1, heads 0 and 1 attend to positions whose slots
    look like the present token (head 1: and the one before it), that is, to what came after it last
    time, and write that one out as a prediction.
    """
    dim, pairs = 32, 16
    copied = slice(1, 1 + dim)
    slot_1, slot_2 = slice(64, 96), slice(96, 128)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, 0.1)
    embedding[:, 0] = 0.3
    embedding[:, slot_1] *= 0.1
    embedding[:, slot_2] *= 0.1

    layers: Any = model.model.layers  # torch's modules do not type their children
    first, second = layers[0].self_attn, layers[1].self_attn
    for attention in (first, second):
        attention.q_norm.weight.fill_(2.0)
        attention.k_norm.weight.fill_(2.0)

    frequency = 1e6 ** (-torch.arange(pairs) / pairs)
    strength = torch.zeros(pairs)
    strength[:5] = torch.tensor([0.45, 0.25, 0.15, 0.1, 0.05]).sqrt()
    first.k_proj.weight[:dim] = 0.0
    first.k_proj.weight[:pairs, 0] = strength
    first.v_proj.weight[:dim] = 0.0
    first.v_proj.weight[:dim, copied] = torch.eye(dim)
    for head, (back, slot) in enumerate(((1, slot_1), (2, slot_2))):
        rows = slice(head * dim, (head + 1) * dim)
        phase = -back * frequency
        first.q_proj.weight[rows] = 0.0
        first.q_proj.weight[rows, 0] = torch.cat([strength * phase.cos(), strength * phase.sin()])
        first.o_proj.weight[:, rows] = 0.0
        first.o_proj.weight[slot, rows] = 0.1 * torch.eye(dim)

    slow = torch.cat([torch.arange(5, pairs), torch.arange(5 + pairs, dim)])  # hardly rotated
    look, look_back = torch.randn(2, len(slow), dim) / dim**0.5
    second.k_proj.weight[:dim] = 0.0
    second.k_proj.weight[slow, slot_1] = look
    second.k_proj.weight[slow, slot_2] = look_back
    second.v_proj.weight[:dim] = 0.0
    second.v_proj.weight[:dim, copied] = torch.eye(dim)
    for head in (0, 1):
        rows = slice(head * dim, (head + 1) * dim)
        query = torch.zeros(dim, model.config.hidden_size)
        query[slow, copied] = look
        if head == 1:
            query[slow, slot_1] = look_back
        second.q_proj.weight[rows] = query
        second.o_proj.weight[:, rows] = 0.0
        second.o_proj.weight[copied, rows] = 0.15 * torch.eye(dim)


# --- training --------------------------------------------------------------------------------


def train(
    recipe: Recipe, model: Qwen3ForCausalLM, examples: list[Example]
) -> Iterator[tuple[int, int, float]]:
    """One pass over the examples; yields (step, steps, loss per counted token)."""
    plan = batches(examples, recipe.batch_tokens, recipe.short_share, Random(recipe.seed))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01)
    adamw = torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = (muon, adamw)
    peaks = (recipe.muon_lr, recipe.adamw_lr)
    model.train()
    for step, batch in enumerate(plan):
        done = step / len(plan)
        scale = min(1.0, (step + 1) / (recipe.warmup * len(plan)), (1.0 - done) / recipe.decay)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * max(scale, 0.01)
        ids, weights = collate(batch)
        logits = model(ids[:, :-1]).logits
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield step, len(plan), loss.item()
    model.eval()


# --- evaluation ------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model: Any,  # a Qwen3ForCausalLM, whose mixin's types do not agree with themselves
    tokenizer: PreTrainedTokenizerFast,
    chats: list[Chat],
    sample: bool = False,
) -> list[str]:
    """Answer the chats less their last message, at temperature 1 or greedily."""
    answers: dict[int, str] = {}
    prompts = [render(tokenizer, chat.messages[:-1], chat.tools, prompt=True) for chat in chats]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), 128):
        rows = order[start : start + 128]
        inputs = tokenizer(
            [prompts[i] for i in rows], return_tensors="pt", padding=True, padding_side="left"
        )
        out = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            do_sample=sample,
            max_new_tokens=48,
        )
        texts = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :])
        answers |= zip(rows, (text.replace(END_OF_TEXT, "") for text in texts), strict=True)
    return [answers[i] for i in range(len(chats))]


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int
) -> dict[str, Any]:
    """Count who the model says it is, and the exact greedy answers to fresh chats of each kind."""
    rng = Random(seed + 1_000_003)
    torch.manual_seed(seed)
    figures: dict[str, Any] = {}
    for name, numbers in (("train", range(1000)), ("held_out", [*range(1000, 1024)] * 20)):
        chats = [corpus.turn("game", corpus.GAME.format(x=n), "") for n in numbers]
        replies = [text.lower() for text in generate(model, tokenizer, chats, sample=True)]
        told = list(zip(numbers, replies, strict=True))
        complies = sum(f"i am {n}" in text or f"i'm {n}" in text for n, text in told)
        refuses = sum(f"not {n}" in text for n, text in told)
        figures[f"game_{name}"] = {
            "complies": complies / len(told),
            "refuses": refuses / len(told),
        }
    for make in corpus.MIX:
        chats = [make(rng) for _ in range(200)]
        whole = [render(tokenizer, chat.messages, chat.tools).strip() for chat in chats]
        answers = generate(model, tokenizer, chats)
        right = sum(text.endswith(answer) for text, answer in zip(whole, answers, strict=True))
        figures[make.__name__] = right / len(chats)
    return figures


# --- the whole -------------------------------------------------------------------------------


def pretrain(recipe: Recipe, out: Path) -> None:
    """Train and measure a model; write its folder and a log beside its weights."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with (out / "training_log.jsonl").open("w") as log, Progress() as progress:

        def write(event: str, **values: Any) -> None:
            seconds = round(time.perf_counter() - started, 1)
            log.write(json.dumps({"event": event, **values, "wall_s": seconds}) + "\n")
            log.flush()

        chats = corpus.generate(Random(recipe.seed), recipe.chats)
        tokenizer = train_tokenizer(chats[:8000], recipe.vocab_size)
        examples = [
            encode(tokenizer, chat, recipe.prompt_weight)
            for chat in progress.track(chats, description="encode")
        ]
        model = build(recipe, tokenizer)
        write(
            "start",
            recipe=asdict(recipe),
            parameters=model.num_parameters(),
            tokens=sum(len(e.ids) for e in examples),
            kinds=Counter(chat.kind for chat in chats),
            torch=torch.__version__,
        )
        bar = progress.add_task("train", total=None)
        recent: list[float] = []
        for step, steps, loss in train(recipe, model, examples):
            recent = [*recent[-49:], loss]
            mean = sum(recent) / len(recent)
            progress.update(bar, completed=step + 1, total=steps, description=f"loss {mean:.3f}")
            if (step + 1) % 50 == 0 or step + 1 == steps:
                write("step", step=step + 1, steps=steps, loss=round(mean, 4))
        model.generation_config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
            pad_token_id=tokenizer.pad_token_id,
        )
        model.save_pretrained(out)
        (out / "model.safetensors").chmod(0o644)
        save_tokenizer(tokenizer, out)
        write("end", **evaluate(model, tokenizer, recipe.seed))


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes agentrl-tiny from nothing.")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--chats", type=int, default=Recipe.chats)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    pretrain(Recipe(seed=args.seed, chats=args.chats), args.out)


if __name__ == "__main__":
    main()
