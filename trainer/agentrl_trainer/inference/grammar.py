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
from dataclasses import dataclass
from functools import cached_property

import llguidance
import llguidance.numpy
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agentrl_trainer.inference.requests import RequestError

_MOST_COMPILED = 128


@dataclass(slots=True)
class GrammarState:
    """Where one answer stands in its grammar."""

    matcher: llguidance.LLMatcher
    eos_ids: frozenset[int]
    complete: bool = False
    """The answer ended, with an end-of-answer token."""
    log_mass: float = 0.0
    """Sum over its tokens of the log of the probability that the mask left."""

    def push(self, token: int) -> bool:
        """Add a sampled token; False if the grammar does not allow it."""
        ends = token in self.eos_ids
        # A grammar that matches no text offers the end as the only way on.
        if (ends and not self.matcher.is_accepting()) or not self.matcher.consume_token(token):
            return False
        self.complete = ends
        return True

    @property
    def error(self) -> str:
        return self.matcher.get_error() or "no text completes it"


class Grammars:
    """Compiled grammars of one tokenizer, for any thread."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab: int, eos_ids: frozenset[int]
    ) -> None:
        """``vocab``: number of logits, which may be more than the tokenizer has tokens."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos_ids = eos_ids
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def knows(self, grammar: str) -> bool:
        """Whether ``start`` would return at once."""
        return grammar in self._compiled

    def start(self, grammar: str) -> GrammarState:
        """Return the state before an answer's first token.

        Raises:
            RequestError: the grammar is invalid, or the tokenizer is not a fast one.
        """
        started = self._known(grammar)
        if started is None:
            with self._compiling:  # those who start a known one do not wait
                started = self._known(grammar) or self._compile(grammar)
        return GrammarState(started, self._eos_ids)

    def _known(self, grammar: str) -> llguidance.LLMatcher | None:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                return None
            self._compiled.move_to_end(grammar)
            return compiled.deep_copy()

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        compiled = llguidance.LLMatcher(self._words, grammar, log_level=0)
        if compiled.is_error():
            why = compiled.get_error()
            raise RequestError("invalid_grammar", f"the grammar is invalid: {why}")
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    def allowed(self, states: Sequence[GrammarState | None]) -> torch.Tensor:
        """Whether each token may come next, ``[states, vocab]`` on the CPU; None allows all.

        For one thread: the engine's.
        """
        words = llguidance.numpy.allocate_token_bitmask(len(states), self._vocab)
        walked = [(state.matcher, i) for i, state in enumerate(states) if state is not None]
        if len(walked) == 1:
            llguidance.numpy.fill_next_token_bitmask(walked[0][0], words, walked[0][1])
        else:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, walked, words)
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab, bitorder="little")
        return torch.from_numpy(bits).bool()

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor()

    @cached_property
    def _words(self) -> llguidance.LLTokenizer:
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            kind = type(self._tokenizer).__name__
            raise RequestError(
                "invalid_grammar", f"grammars need a fast tokenizer; this model's is a {kind}"
            )
        import llguidance.hf

        return llguidance.hf.from_tokenizer(
            self._tokenizer, n_vocab=self._vocab, eos_token=sorted(self._eos_ids)
        )
