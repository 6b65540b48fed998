"""Enforce grammars: which tokens may come next, so that an answer conforms to a schema.

Knows llguidance and a tokenizer, not logits or requests.

A grammar is a text in llguidance's form (Lark, with ``%json {schema}`` for JSON). Compiling one
takes milliseconds (seconds for the first: the tokenizer is read), so that happens on the thread
that submits a request, once per distinct text. Each sequence walks a copy of its own, which
survives preemption as its tokens do. End-of-answer tokens are allowed only where the grammar is
complete.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import llguidance
import llguidance.numpy
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agentrl_trainer.inference.requests import RequestError

_MOST_COMPILED = 128


class Grammars:
    """Compiled grammars of one tokenizer, for any thread."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab: int, eos_ids: frozenset[int]
    ) -> None:
        """``vocab``: number of logits, which may be more than the tokenizer has tokens."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos_ids = eos_ids
        self._lock = threading.Lock()
        self._words: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def knows(self, grammar: str) -> bool:
        """Whether ``start`` would return at once."""
        return grammar in self._compiled

    def start(self, grammar: str) -> GrammarState:
        """Return the state before an answer's first token.

        Raises:
            RequestError: the grammar is invalid, or the tokenizer is not a fast one.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = self._compiled[grammar] = self._compile(grammar)
                if len(self._compiled) > _MOST_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return GrammarState(compiled.deep_copy(), self._eos_ids)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if self._words is None:
            self._words = self._read_tokenizer()
        matcher = llguidance.LLMatcher(self._words, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError("invalid_grammar", f"the grammar is invalid: {matcher.get_error()}")
        return matcher

    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            kind = type(self._tokenizer).__name__
            raise RequestError(
                "invalid_grammar", f"grammars need a fast tokenizer; this model's is a {kind}"
            )
        import llguidance.hf

        return llguidance.hf.from_tokenizer(
            self._tokenizer, n_vocab=self._vocab, eos_token=sorted(self._eos_ids)
        )


class GrammarState:
    """Where one answer stands in its grammar."""

    __slots__ = ("_eos_ids", "complete", "log_mass", "matcher")

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self._eos_ids = eos_ids
        self.complete = False
        """The answer ended, with an end-of-answer token."""
        self.log_mass = 0.0
        """Sum over its tokens of the log of the probability that the mask left."""

    def push(self, token: int) -> bool:
        """Add a sampled token; False if the grammar does not allow it."""
        ends = token in self._eos_ids
        # A grammar that matches no text offers the end as the only way on.
        if ends and not self.matcher.is_accepting():
            return False
        if not self.matcher.consume_token(token):
            return False
        self.complete = ends
        return True

    @property
    def error(self) -> str:
        return self.matcher.get_error() or "no text completes it"


class GrammarMasks:
    """Fills the masks of several answers at once."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._executor: llguidance.LLExecutor | None = None

    def allowed(self, states: Sequence[GrammarState]) -> torch.Tensor:
        """Whether each token may come next, ``[states, vocab]`` on the CPU."""
        words = llguidance.numpy.allocate_token_bitmask(len(states), self._vocab)
        if len(states) == 1:
            llguidance.numpy.fill_next_token_bitmask(states[0].matcher, words)
        else:
            if self._executor is None:
                self._executor = llguidance.LLExecutor()
            llguidance.numpy.fill_next_token_bitmask_par(
                self._executor, [(state.matcher, i) for i, state in enumerate(states)], words
            )
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab, bitorder="little")
        return torch.from_numpy(bits).bool()
