"""Train the tokenizer of ``agentrl-tiny`` and render chats with its template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vocabulary import Chat

from agentrl_trainer.tiny import MODEL_DIR

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
CHAT_TEMPLATE = (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")


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
