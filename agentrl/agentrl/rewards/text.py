"""Rewards that read the answer: equality, numbers, JSON, patterns, tags, length, tests of code."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from agentrl.scoring.functions import RewardOfTrace
from agentrl.scoring.trace import Trace

_SNIPPETS = "agentrl.runner.coding_tasks.snippets"
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?(?!\d)"
)
_FENCED = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)\n?[ \t]*```", re.DOTALL)


def field_of(trace: Trace, field: str) -> Any:
    """Return a field of the rollout's task; dots lead into objects.

    Raises:
        ValueError: the task has no such field, or it is null.
    """
    found: Any = trace.task
    for key in field.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    if found is None:
        known = ", ".join(map(str, trace.task)) or "none"
        raise ValueError(f"the task has no field {field!r} (there: {known})")
    return found


def expected_of(trace: Trace, field: str) -> list[Any]:
    """Return the right answers of a task: a list means any of its items."""
    found = field_of(trace, field)
    return found if isinstance(found, list) else [found]


def exact(
    field: str = "answer", *, pattern: str | None = None, ignore_case: bool = False
) -> RewardOfTrace:
    r"""Reward 1 if the answer is the task's ``field``, or one of it if that is a list; else 0.

    White space around and between words does not count.

    Args:
        pattern: regular expression whose last match is compared instead of the whole answer, by
            its first group where it has one: ``r"<answer>(.*?)</answer>"``, ``r"####\s*(.+)"``.
        ignore_case: upper and lower case are equal.
    """
    found = re.compile(pattern, re.DOTALL) if pattern else None

    def plain(text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if ignore_case else text

    def score(trace: Trace) -> float:
        said = trace.answer
        if found is not None:
            matches = list(found.finditer(said))
            if not matches:
                return 0.0
            said = matches[-1][1 if found.groups else 0] or ""
        return float(
            plain(said)
            in (
                plain(one if isinstance(one, str) else json.dumps(one))
                for one in expected_of(trace, field)
            )
        )

    return score


def numeric(field: str = "answer", *, tolerance: float | None = None) -> RewardOfTrace:
    """Reward 1 if the last number of the answer is that of the task's ``field``; else 0.

    Thousands may have commas: 1,234.5. Of a text in ``field``, such as GSM8K's with its steps, the
    last number counts; a list means any of its items.

    Args:
        tolerance: largest difference, relative to the right number or absolute. By default whole
            numbers must be equal, and others may differ by 1e-6.
    """

    def equal(said: float, right: float) -> bool:
        if tolerance is None and said.is_integer() and right.is_integer():
            return said == right
        allowed = 1e-6 if tolerance is None else tolerance
        return math.isclose(said, right, rel_tol=allowed, abs_tol=allowed)

    def score(trace: Trace) -> float:
        rights = map(last_number, map(str, expected_of(trace, field)))
        known = [right for right in rights if right is not None]
        if not known:
            raise ValueError(
                f"the task's field {field!r} has no number: {field_of(trace, field)!r}"
            )
        said = last_number(trace.answer)
        return float(said is not None and any(equal(said, right) for right in known))

    return score


def last_number(text: str) -> float | None:
    """Return the last number in a text; None without one."""
    found = [match for match in _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-")) if match]
    return float(found[-1].replace(",", "")) if found else None


def json_schema(schema: dict[str, Any] | None = None, *, field: str = "schema") -> RewardOfTrace:
    """Reward 1 if the answer is JSON that a JSON schema accepts; else 0.

    The answer may be one fenced code block, or have one.

    Args:
        schema: by default that of the task's ``field``.

    Raises:
        jsonschema.SchemaError: ``schema`` is none.
    """
    from jsonschema import ValidationError
    from jsonschema.validators import validator_for

    def validator(schema: Any) -> Any:
        kind = validator_for(schema)
        kind.check_schema(schema)
        return kind(schema)

    known = None if schema is None else validator(schema)

    def score(trace: Trace) -> float:
        wanted = known or validator(field_of(trace, field))
        text = last_block(trace.answer, "json") or trace.answer
        try:
            wanted.validate(json.loads(text))
        except (ValueError, RecursionError, ValidationError):
            return 0.0
        return 1.0

    return score


def last_block(text: str, *languages: str) -> str | None:
    """Return the last fenced code block of one of the languages, or without one; None without."""
    found = [block for language, block in _FENCED.findall(text) if language in ("", *languages)]
    return found[-1] if found else None


def regex(pattern: str | None = None, *, field: str = "pattern") -> RewardOfTrace:
    """Reward 1 if a regular expression is found in the answer; else 0. A dot fits line ends, too.

    Args:
        pattern: by default that of the task's ``field``.
    """
    known = re.compile(pattern, re.DOTALL) if pattern is not None else None

    def score(trace: Trace) -> float:
        wanted = known or re.compile(str(field_of(trace, field)), re.DOTALL)
        return float(wanted.search(trace.answer) is not None)

    return score


def format_tags(*tags: str) -> RewardOfTrace:
    """Reward 1 if the answer is these tags, once each, filled, in this order; else 0.

    By default ``<think>`` and ``<answer>``. Reasoning that the gateway has split off counts as
    ``<think>``.
    """
    names = tags or ("think", "answer")
    inside = r"\s*".join(rf"<{name}>(?=\s*[^\s<])(.*?)</{name}>" for name in map(re.escape, names))
    whole = re.compile(rf"\s*{inside}\s*", re.DOTALL)

    def score(trace: Trace) -> float:
        text = _with_reasoning(trace)
        once = all(text.count(f"<{name}>") == text.count(f"</{name}>") == 1 for name in names)
        return float(once and whole.fullmatch(text) is not None)

    return score


def _with_reasoning(trace: Trace) -> str:
    last = trace.messages[-1] if trace.messages else {}
    content, thought = last.get("content"), last.get("reasoning_content") or last.get("reasoning")
    if isinstance(content, str) and "<think>" in content:
        return content
    return f"<think>{thought}</think>{trace.answer}" if thought else trace.answer


def length(limit: int = 512, buffer: int = 0) -> RewardOfTrace:
    """Punish long answers: 0 up to ``limit - buffer`` sampled tokens, -1 beyond ``limit``, and
    linear in between, as DAPO does (arXiv:2503.14476, equation 13).

    Counts the tokens of the longest call, reasoning included. Calls of other models do not count.
    """

    def score(trace: Trace) -> float:
        own = [call for call in trace.calls if call.prompt_ids] or trace.calls
        tokens = max((call.tokens[1] for call in own if call.tokens), default=0)
        if tokens <= limit - buffer:
            return 0.0
        return -1.0 if tokens > limit else (limit - buffer - tokens) / buffer

    return score


def code_tests(
    field: str = "tests", *, seconds: float = 10.0, memory_mb: float = 1024.0,
    sandboxed: bool = True,
) -> RewardOfTrace:  # fmt: skip
    """Reward the share of tests that the answer's last Python code block passes.

    The task's ``field`` is a list of tests, or one. A test is Python code, such as an ``assert``,
    that runs after the answer's, in one program. An answer without a code block gets 0.

    Args:
        seconds, memory_mb: limits of one test.
        sandboxed: run in bubblewrap, without network and the user's files.
    """
    limits = {"seconds": seconds, "memory_mb": memory_mb, "sandboxed": sandboxed}

    def score(trace: Trace) -> float:
        tests, code = field_of(trace, field), last_block(trace.answer, "python", "py", "python3")
        tests = [tests] if isinstance(tests, str) else tests
        if not tests or not all(isinstance(test, str) for test in tests):
            raise ValueError(f"the task's field {field!r} is no list of Python code")
        if code is None:
            return 0.0
        job = json.dumps({"code": code, "tests": tests, **limits})
        done = subprocess.run(
            [sys.executable, "-m", _SNIPPETS],
            input=job,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["the tests did not run"])[-1])
        return json.loads(done.stdout) / len(tests)

    return score
