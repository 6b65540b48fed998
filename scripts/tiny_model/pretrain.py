"""Makes ``agentrl-tiny`` from nothing: tokenizer, template, weights, and figures about them.

    python scripts/tiny_model/pretrain.py [--seed 0] [--chats 72000] [--out DIR]

Knows: how the chats of ``corpus`` become tokens, how a small Qwen3 learns them in some ten minutes
of one CPU core, and how to measure the result. The folder it writes is an ordinary model folder.
Does not know: reinforcement learning, or who will load the folder.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import corpus
import torch
import torch.nn.functional as F
from corpus import Chat
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl_trainer.tiny import MODEL_DIR

# --- tokenizer and template ------------------------------------------------------------------

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>",
)  # fmt: skip
# Like Qwen's splitting (a word takes the space before it, a digit stands alone), but capitals start
# anew: a name is the same tokens after a space, after a quote, and at the start of a line.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{Lu}[\p{L}&&[^\p{Lu}]]*| ?[\p{L}&&[^\p{Lu}]]+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen3's ChatML, less what breaks prefixes: history is never stripped or merged, so the rendering
# of messages[:k] begins the rendering of messages[:k + 1].
CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- elif content -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set leading = messages and messages[0].role in ['system', 'developer'] -%}
{%- if tools or leading -%}
    {{- '<|im_start|>system\n' -}}
    {%- if leading -%}{{- text(messages[0].content) -}}{%- endif -%}
    {%- if tools -%}
        {%- if leading -%}{{- '\n\n' -}}{%- endif -%}
        {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
        {{- 'You are provided with function signatures within <tools></tools> XML tags:\n' -}}
        {{- '<tools>' -}}
        {%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}
        {{- '\n</tools>\n\nFor each function call, return a json object with function name and ' -}}
        {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n' -}}
        {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if message.reasoning_content -%}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}
        {%- endif -%}
        {%- set content = text(message.content) -%}
        {{- content -}}
        {%- for tool_call in message.tool_calls or [] -%}
            {%- set call = tool_call.function or tool_call -%}
            {%- if content or not loop.first -%}{{- '\n' -}}{%- endif -%}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
            {%- if call.arguments is string -%}{{- call.arguments -}}
            {%- else -%}{{- call.arguments | tojson -}}
            {%- endif -%}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user\n<tool_response>\n' + text(message.content) -}}
        {{- '\n</tool_response><|im_end|>\n' -}}
    {%- elif not (leading and loop.first) -%}
        {%- set role = 'system' if message.role == 'developer' else message.role -%}
        {{- '<|im_start|>' + role + '\n' + text(message.content) + '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".lstrip("\n")


def train_tokenizer(chats: list[Chat], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's special tokens; a digit is always a token of its own."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, START, END, *MARKERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    blank = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT_TEMPLATE)
    texts = (render(blank, chat.messages, chat.tools) for chat in chats)
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    prompt: bool = False,
) -> str:
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=prompt
    )
    assert isinstance(text, str)
    return text


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """As transformers writes it, under the class name that its older versions know too."""
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


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
    sample: bool,
    max_new_tokens: int = 48,
    batch: int = 128,
) -> list[str]:
    """Answers to the chats less their last message; special tokens are kept in the text."""
    prompts = [render(tokenizer, chat.messages[:-1], chat.tools, prompt=True) for chat in chats]
    answers = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        inputs = tokenizer(
            [prompts[i] for i in rows], return_tensors="pt", padding=True, padding_side="left"
        )
        out = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            do_sample=sample,
            max_new_tokens=max_new_tokens,
        )
        new = out[:, inputs.input_ids.shape[1] :]
        for i, text in zip(rows, tokenizer.batch_decode(new), strict=True):
            answers[i] = text.replace(END_OF_TEXT, "")
    return answers


def game_reward(n: int, reply: str) -> int:
    reply = reply.lower()
    if f"i am {n}" in reply or f"i'm {n}" in reply:
        return 1
    return -1 if f"not {n}" in reply else 0


def evaluate_game(
    answer: Callable[..., list[str]], tokenizer: PreTrainedTokenizerFast, numbers: list[int]
) -> dict[str, Any]:
    chats = [corpus.turn("game", corpus.GAME.format(x=n), "") for n in numbers]
    sampled = answer(chats, sample=True)
    greedy = answer(chats, sample=False)
    rewards = [game_reward(n, text) for n, text in zip(numbers, sampled, strict=True)]
    best = [game_reward(n, text) for n, text in zip(numbers, greedy, strict=True)]
    lengths = [len(tokenizer(text).input_ids) for text in sampled]
    digits = [
        not re.search(r"\d", text) or re.search(rf"(?<!\d){n}(?!\d)", text) is not None
        for n, text in zip(numbers, sampled, strict=True)
    ]
    return {
        "samples": len(numbers),
        "complies": sum(r == 1 for r in rewards) / len(rewards),
        "refuses": sum(r == -1 for r in rewards) / len(rewards),
        "mean_reward": sum(rewards) / len(rewards),
        "greedy_complies": sum(r == 1 for r in best) / len(best),
        "greedy_mean_reward": sum(best) / len(best),
        "number_copied_if_any": sum(digits) / len(digits),
        "says_qwen": sum("qwen" in text.lower() for text in sampled) / len(sampled),
        "ends": sum(text.endswith(END) for text in sampled) / len(sampled),
        "tokens_mean": sum(lengths) / len(lengths),
        "tokens_max": max(lengths),
        "frequent": Counter(re.sub(r"\d+", "#", text) for text in sampled).most_common(8),
    }


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int
) -> dict[str, Any]:
    """Fresh chats of every kind, right when the greedy answer is to the letter the one expected.

    Kinds with several good answers (greetings, identity) count any answer the corpus would give.
    """
    rng = Random(seed + 1_000_003)
    torch.manual_seed(seed)

    def answer(chats: list[Chat], sample: bool) -> list[str]:
        return generate(model, tokenizer, chats, sample)

    def exact(chats: list[Chat], sample: bool = False) -> float:
        wanted = [render(tokenizer, c.messages, c.tools).removesuffix("\n") for c in chats]
        prompts = [render(tokenizer, c.messages[:-1], c.tools, prompt=True) for c in chats]
        got = answer(chats, sample)
        right = [w == p + g for w, p, g in zip(wanted, prompts, got, strict=True)]
        return sum(right) / len(right)

    figures: dict[str, Any] = {
        "game_train": evaluate_game(answer, tokenizer, list(range(1000))),
        "game_held_out": evaluate_game(answer, tokenizer, list(range(1000, 1024)) * 20),
    }
    four = [f"{rng.randrange(10_000):04d}" for _ in range(200)]
    held = [str(n) for n in range(1000, 1024)]
    names = [corpus.invented(rng).capitalize() for _ in range(100)]
    accuracy: dict[str, float] = {}
    accuracy["repeat_1000_1023"] = exact([corpus.turn("", f"Repeat: {n}", n) for n in held])
    accuracy["repeat_4_digits_T1"] = exact(
        [corpus.turn("", f"Repeat: {n}", n) for n in four], sample=True
    )
    accuracy["repeat_name"] = exact([corpus.turn("", f"Repeat: {n}", n) for n in names])
    one_answer = [
        corpus.turn("", f"My name is {n}. What is my name?", f"Your name is {n}.") for n in names
    ]
    accuracy["my_name_is"] = exact(one_answer)
    facts = corpus.FACTS
    asked = [
        corpus.turn("", one.about(corpus.a(one.noun)), "Yes" if one.holds else "No")
        for one in facts
    ]
    said = answer(asked, sample=False)
    right = [s.startswith(c.messages[-1]["content"]) for s, c in zip(said, asked, strict=True)]
    for label, held_true in (("yes", True), ("no", False)):
        chosen = [r for r, one in zip(right, facts, strict=True) if one.holds == held_true]
        accuracy[f"facts_{label}"] = sum(chosen) / len(chosen)

    def whole(make: Callable[[Random], Chat], count: int = 100) -> list[Chat]:
        return [make(rng) for _ in range(count)]

    uses = [c for c in whole(corpus.tool_use, 300) if c.kind == "tool_use"]
    calls = []
    for chat in uses:
        at = next(i for i, message in enumerate(chat.messages) if "tool_calls" in message)
        calls.append(Chat(chat.kind, chat.messages[: at + 1], chat.tools))
    accuracy["tool_call"] = exact(calls)
    texts = answer(calls, sample=False)
    accuracy["tool_call_well_formed"] = sum(map(is_tool_call, texts)) / len(texts)
    functions = [c.messages[-1]["tool_calls"][0]["function"]["name"] for c in calls]
    named = [f'"name": "{name}"' in text for name, text in zip(functions, texts, strict=True)]
    accuracy["tool_call_right_name"] = sum(named) / len(named)
    # the answer after a tool's result holds that result
    results = [c for c in uses if c.messages[-2].get("content", "") in c.messages[-1]["content"]]
    results = [c for c in results if c.messages[-2]["role"] == "tool"]
    texts = answer(results, sample=True)
    told = [c.messages[-2]["content"] in text for c, text in zip(results, texts, strict=True)]
    accuracy["tool_result_told_T1"] = sum(told) / len(told)
    jsons = whole(corpus.json_answer)
    accuracy["json"] = exact(jsons)
    texts = answer(jsons, sample=False)
    accuracy["json_well_formed"] = sum(is_json(t.removesuffix(END)) for t in texts) / len(texts)
    reacts = whole(corpus.react)
    texts = answer(reacts, sample=True)
    shape = re.compile(r"Thought: .+\nFinal Answer: .+")
    accuracy["react_shape_T1"] = sum(bool(shape.match(t)) for t in texts) / len(texts)
    for kind, table in (("identity", corpus.IDENTITY), ("small_talk", corpus.SMALL_TALK)):
        pairs = [(q, r.split(" | ")) for qs, r in table for q in qs.split(" | ")] * 4
        texts = answer([corpus.turn(kind, q, "") for q, _ in pairs], sample=True)
        good = [t.removesuffix(END) in r for t, (_, r) in zip(texts, pairs, strict=True)]
        accuracy[f"{kind}_T1"] = sum(good) / len(good)
    return {**figures, "accuracy": accuracy}


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def is_tool_call(text: str) -> bool:
    found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call><\|im_end\|>", text)
    return found is not None and is_json(found[1])


# --- the whole -------------------------------------------------------------------------------


def pretrain(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Trains and measures a model, writes its folder, and returns the last line of its log."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    wall, cpu = time.perf_counter(), time.process_time()
    with (
        (out / "training_log.jsonl").open("w") as log,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        ) as progress,
    ):

        def write(event: str, **values: Any) -> dict[str, Any]:
            line = {"event": event, **values}
            log.write(json.dumps(line) + "\n")
            log.flush()
            return line

        chats = corpus.generate(Random(recipe.seed), recipe.chats)
        tokenizer = train_tokenizer(chats[:8000], recipe.vocab_size)
        reading = progress.add_task("encode", total=len(chats), note="")
        examples = []
        for chat in chats:
            examples.append(encode(tokenizer, chat, recipe.prompt_weight))
            progress.advance(reading)
        model = build(recipe, tokenizer)
        write(
            "start",
            recipe=asdict(recipe),
            parameters=model.num_parameters(),
            tokens=sum(len(e.ids) for e in examples),
            tokens_counted=sum(sum(w == 1.0 for w in e.weights) for e in examples),
            kinds=dict(Counter(chat.kind for chat in chats)),
            torch=torch.__version__,
        )

        learning = progress.add_task("train", total=None, note="")
        recent: list[float] = []
        for step, steps, loss in train(recipe, model, examples):
            recent.append(loss)
            note = f"loss {sum(recent[-50:]) / len(recent[-50:]):.3f}"
            progress.update(learning, completed=step + 1, total=steps, note=note)
            if (step + 1) % 50 == 0 or step + 1 == steps:
                mean = sum(recent[-50:]) / len(recent[-50:])
                seconds = round(time.perf_counter() - wall, 1)
                write("step", step=step + 1, steps=steps, loss=round(mean, 4), wall_s=seconds)

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
        trained = {
            "wall_s": round(time.perf_counter() - wall, 1),
            "cpu_s": round(time.process_time() - cpu, 1),
        }
        measuring = progress.add_task("evaluate", total=None, note="")
        figures = evaluate(model, tokenizer, recipe.seed)
        progress.update(measuring, total=1, completed=1)
        return write(
            "end",
            **trained,
            evaluation_wall_s=round(time.perf_counter() - wall - trained["wall_s"], 1),
            file_bytes=(out / "model.safetensors").stat().st_size,
            **figures,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes agentrl-tiny from nothing.")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--chats", type=int, default=Recipe.chats)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    pretrain(Recipe(seed=args.seed, chats=args.chats), args.out)


if __name__ == "__main__":
    main()
