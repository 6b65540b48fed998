"""The ready rewards of ``agentrl.rewards``, each with its edges."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from typing import Any

import pytest
from call_records import make

from agentrl import rewards
from agentrl.config.errors import ConfigError
from agentrl.rewards import Trace
from agentrl.rewards.text import last_number
from agentrl.scoring.functions import load_functions


def said(text: str, messages: Any = (), calls: Any = (), **task: Any) -> Trace:
    return Trace(task, "rollout", "attempt", "group", [*messages], text, [*calls], [], {})


def of(reward: Any, text: str, **task: Any) -> Any:
    return reward(said(text, **task))


def test_importing_the_rewards_loads_no_torch() -> None:
    heavy = ["torch", "transformers", "litellm", "fastapi", "math_verify", "jsonschema"]
    code = f"import sys, agentrl.rewards; sys.exit(str([m for m in {heavy} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"


def test_each_is_named_directly_with_its_defaults() -> None:
    names = ("exact", "numeric", "json_schema", "regex", "code_tests", "format_tags", "length")
    found = load_functions([f"agentrl.rewards:{name}" for name in names])
    assert [one.name for one in found] == list(names)
    assert found[0].call(said("4", answer=4)) == 1.0


def test_a_missing_field_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no field 'answer' \(there: question\)"):
        of(rewards.exact(), "x", question="y")


@pytest.mark.parametrize(
    ("answer", "task", "options", "wanted"),
    [
        (" new\n york ", "new york", {}, 1),
        ("New York", "new york", {}, 0),
        ("New York", "new york", {"ignore_case": True}, 1),
        ("", "new york", {}, 0),
        ("b", ["a", "b"], {}, 1),
        ("4", 4, {}, 1),
        (
            "so <answer>x</answer> no, <answer> y </answer>",
            "y",
            {"pattern": r"<answer>(.*?)</a"},
            1,
        ),
        (
            "so <answer>x</answer> no, <answer> y </answer>",
            "x",
            {"pattern": r"<answer>(.*?)</a"},
            0,
        ),
        ("y", "y", {"pattern": r"<answer>(.*?)</answer>"}, 0),
        ("it is B", "B", {"pattern": r"[A-D]"}, 1),
    ],
)
def test_exact(answer: str, task: Any, options: Any, wanted: float) -> None:
    assert of(rewards.exact(**options), answer, answer=task) == wanted


def test_a_field_may_be_within_an_object() -> None:
    assert of(rewards.exact("info.gold"), "x", info={"gold": "x"}) == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then 1,234.50.", 1234.5), ("$72", 72), ("x=-5", -5), ("10-5", 5), ("−3", -3),
        ("2.5e3", 2500), (".5", 0.5), ("**7**", 7), ("v2 of it", None), ("none", None), ("", None),
        (r"\boxed{18}", 18), ("12,34", 34), ("#### 1,000", 1000), ("50%", 50),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_numeric_allows_a_difference() -> None:
    assert of(rewards.numeric(), "about 3.14", answer=math.pi) == 0
    assert of(rewards.numeric(tolerance=0.01), "about 3.14", answer=math.pi) == 1
    assert of(rewards.numeric(), "it is 72", answer="6 * 12 = 72\n#### 72") == 1
    assert of(rewards.numeric(), "0.0000001", answer=0) == 1
    assert of(rewards.numeric(), "1e999", answer=1) == 0
    with pytest.raises(ValueError, match="has no number: 'many'"):
        of(rewards.numeric(), "3", answer="many")
    with pytest.raises(ValueError, match="has no number: 'many'"):
        of(rewards.numeric("meta.answer"), "3", meta={"answer": "many"})
    assert of(rewards.numeric(), "7006653", answer=7006652) == 0  # whole numbers are exact
    assert of(rewards.numeric(), "7,006,652.0", answer=7006652) == 1
    assert of(rewards.numeric(tolerance=1e-6), "7006653", answer=7006652) == 1


_SCHEMA = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ('{"age": 3}', 1),
        ('Here:\n```json\n{"age": 3}\n```\nDone.', 1),
        ('```\n{"age": 3}\n```', 1),
        ('{"age": "3"}', 0),
        ("{}", 0),
        ('{"age": 3} and more', 0),
        ("no JSON", 0),
        ("[" * 100_000, 0),
    ],
)
def test_json_schema(answer: str, wanted: float) -> None:
    assert of(rewards.json_schema(_SCHEMA), answer) == wanted
    assert of(rewards.json_schema(), answer, schema=_SCHEMA) == wanted


def test_a_schema_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(Exception, match="'int' is not valid"):
        rewards.json_schema({"type": "int"})


def test_regex_is_of_the_file_or_of_the_task() -> None:
    assert of(rewards.regex(r"^Dear .*Yours"), "Dear Ann,\nall is well.\nYours") == 1
    assert of(rewards.regex(r"\d"), "none") == 0
    assert of(rewards.regex(field="must_have"), "a cat", must_have="c.t") == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>\na\n</think>\n\n<answer>b < c</answer>\n", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think>b", 0),
        ("<think> </think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("", 0),
    ],
)
def test_format_tags(text: str, wanted: float) -> None:
    whole = [{"role": "assistant", "content": text}]
    assert rewards.format_tags()(said(text, whole)) == wanted


def test_reasoning_that_the_gateway_split_off_is_the_think_tag() -> None:
    last = {"role": "assistant", "content": "<answer>4</answer>", "reasoning_content": "2 + 2"}
    trace = said("<answer>4</answer>", [last])
    assert rewards.format_tags()(trace) == 1
    assert rewards.format_tags("answer")(said("<answer>4</answer>")) == 1


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(0, 0), (80, 0), (90, -0.5), (100, -1), (101, -1), (500, -1)]
)
def test_length_is_the_punishment_of_dapo(tokens: int, wanted: float) -> None:
    trl = pytest.importorskip("trl.rewards")
    calls = [make("short", [1], [2] * 3), make("call", [1, 2], [7] * tokens)]
    assert rewards.length(100, 20)(said("", calls=calls if tokens else [])) == wanted
    assert trl.get_soft_overlong_punishment(100, 20)([[7] * tokens]) == [wanted]


def test_length_leaves_other_models_out() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 900}
    judge = make("judge", [], [], params={"usage": usage})
    assert rewards.length(100, 20)(said("", calls=[make("own", [1], [7] * 20), judge])) == 0
    assert rewards.length(100, 20)(said("", calls=[judge])) == -1  # the model was a provider's


# ---- several together


def test_weighted_parts_are_rewards_of_their_names() -> None:
    score = rewards.weighted(
        correct=(1.0, rewards.numeric()), polite=(0.2, rewards.regex("please")),
        none=(5.0, lambda trace: None), many=(2.0, lambda trace: {"a": 1, "b": 2}),
    )  # fmt: skip
    assert of(score, "please, 4", answer=4) == {
        "correct": 1.0, "polite": 0.2, "many.a": 2.0, "many.b": 4.0,
    }  # fmt: skip
    assert of(rewards.weighted(none=(1.0, lambda trace: None)), "") is None


def test_a_part_that_compares_groups_or_is_async_is_refused() -> None:
    async def late(trace: Trace) -> float:
        return 1.0

    for reward in (rewards.group_reward(lambda traces: []), late):
        with pytest.raises(ValueError, match="rank compares groups, as judges do, or is async"):
            rewards.weighted(rank=(1.0, reward))


# ---- code

_ADD = "Like this:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is all."


@pytest.fixture
def run_tests() -> Any:
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    return rewards.code_tests(seconds=60)


@pytest.mark.parametrize(
    ("answer", "tests", "wanted"),
    [
        (_ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        (_ADD, "assert add(1, 2) == 3", 1.0),
        # What ends the process before its tests has not passed them.
        ("```python\nimport os\nos._exit(0)\n```", ["assert False"], 0.0),
        ("```python\nthis is no code\n```", ["assert True"], 0.0),
        ("no code at all", ["assert True"], 0.0),
        ("```bash\nls\n```", ["assert True"], 0.0),
    ],
)
def test_code_earns_the_share_of_tests_that_it_passes(
    run_tests: Any, answer: str, tests: Any, wanted: float
) -> None:
    assert of(run_tests, answer, tests=tests) == wanted


def test_code_has_no_network_and_a_limit_of_time(run_tests: Any) -> None:
    asks = "```python\nimport socket\nsocket.create_connection(('1.1.1.1', 80), timeout=1)\n```"
    assert of(run_tests, asks, tests=["assert True"]) == 0.0
    quick = rewards.code_tests(seconds=1)
    assert of(quick, "```python\nwhile True: pass\n```", tests=["assert True"]) == 0.0


@pytest.mark.parametrize("tests", [[], [{"input": "1"}]])
def test_tests_that_are_none_are_named(tests: Any) -> None:
    with pytest.raises(ValueError, match="field 'tests' is no list of Python code"):
        of(rewards.code_tests(), _ADD, tests=tests)


# ---- mathematics


def test_without_math_verify_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rewards.mathematics.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install math-verify"):
        rewards.symbolic()


def test_symbolic() -> None:
    pytest.importorskip("math_verify")
    reward = rewards.symbolic(seconds=2)
    for right, answer, wanted in (
        ("1/2", r"The answer is $\frac{1}{2}$", 1), (r"\frac{1}{2}", "0.5", 1),
        ("x^2+2x+1", r"so $(x+1)^2$", 1), (r"\sqrt{8}", r"$2\sqrt{2}$", 1), ("3", "4", 0),
        (["1", "2"], r"\boxed{2}", 1), ("3", "", 0),
        ("3", r"\boxed{9^{9^{9^{9}}}}", 0), ("4", "4", 1),  # and goes on after a timeout
    ):  # fmt: skip
        assert of(reward, answer, answer=right) == wanted, (right, answer)
    with pytest.raises(ValueError, match="is no mathematics: ''"):
        of(reward, "3", answer="")
