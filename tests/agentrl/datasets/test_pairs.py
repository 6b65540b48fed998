"""Pairs of answers in the forms that users have them; what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest
from chat_data import TOOL, asked
from pair_data import answer

from agentrl.datasets.pairs import to_pair

ASKED, GOOD, BAD = asked(7), answer("I am 7."), answer("I am Qwen.")

HH = "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: Is\n\nit 7?\n\nAssistant: "
BEFORE = [{"role": "user", "content": "Hi."}, answer("Hello.")]


@pytest.mark.parametrize(
    ("data", "prompt", "chosen", "rejected"),
    [
        ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, [ASKED], [GOOD], [BAD]),
        (
            {"prompt": ASKED["content"], "chosen": GOOD["content"], "rejected": BAD["content"]},
            [ASKED], [GOOD], [BAD],
        ),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, [ASKED], [GOOD], [BAD]),
        (  # UltraFeedback binarized
            {
                "prompt": ASKED["content"], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD],
                "score_chosen": 8.0, "score_rejected": 7.5,
            },
            [ASKED], [GOOD], [BAD],
        ),
        (
            {"chosen": HH + "Yes, 7.", "rejected": HH + "No."},
            [*BEFORE, {"role": "user", "content": "Is\n\nit 7?"}], [answer("Yes, 7.")],
            [answer("No.")],
        ),
        (
            {
                "context": [*BEFORE, ASKED], "response1": "I am 7.", "response2": "I am Qwen.",
                "overall_preference": -2, "domain": "general",
            },
            [*BEFORE, ASKED], [GOOD], [BAD],
        ),
        (
            {
                "context": [ASKED], "response1": "I am Qwen.", "response2": "I am 7.",
                "overall_preference": 1,
            },
            [ASKED], [GOOD], [BAD],
        ),
        (
            {
                "instruction": ASKED["content"],
                "completions": [
                    {"response": "I am no 7.", "overall_score": 5},
                    {"response": "I am Qwen.", "overall_score": "2"},
                    {"response": "I am 7.", "overall_score": 7.5},
                ],
            },
            [ASKED], [GOOD], [BAD],
        ),
        (  # agentrl runs export --format pairs, of rollouts whose answers differ early
            {
                "prompt": [ASKED], "chosen": [GOOD, ASKED, GOOD], "rejected": [BAD],
                "reward_chosen": 1.0, "reward_rejected": 0.0, "rollouts": ["a", "b"],
            },
            [ASKED], [GOOD, ASKED, GOOD], [BAD],
        ),
    ],
    ids=["trl", "texts", "implicit", "binarized", "hh", "steer-1", "steer-2", "ultra", "export"],
)  # fmt: skip
def test_every_form_becomes_a_prompt_and_two_answers(
    data: dict[str, Any], prompt: list[Any], chosen: list[Any], rejected: list[Any]
) -> None:
    found = to_pair(data)
    assert not isinstance(found, str)
    assert [chat.messages for chat in found] == [prompt + chosen, prompt + rejected]
    assert found[0].weights == [0.0] * len(prompt) + [1.0] * len(chosen)


SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    "data",
    [
        {"system": "Be kind.", "prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"system": "Be kind.", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {
            "prompt": ASKED["content"],
            "chosen": [SYSTEM, ASKED, GOOD],
            "rejected": [SYSTEM, ASKED, BAD],
        },
        {
            "prompt": [ASKED | {"name": None}],
            "chosen": [SYSTEM, ASKED, GOOD | {"tool_calls": None}],
            "rejected": [SYSTEM, ASKED, BAD],
        },
    ],
)
def test_a_system_message_and_the_prompt_are_told_once(data: dict[str, Any]) -> None:
    found = to_pair(data)
    assert not isinstance(found, str)
    assert [chat.messages for chat in found] == [[SYSTEM, ASKED, GOOD], [SYSTEM, ASKED, BAD]]
    assert found[0].weights == [0.0, 0.0, 1.0]


def test_scores_that_are_text_compare_as_numbers() -> None:
    one = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert not isinstance(to_pair(one | {"score_chosen": "10", "score_rejected": "9"}), str)
    assert isinstance(to_pair(one | {"score_chosen": "7", "score_rejected": "10"}), str)


def test_tools_go_with_the_pair() -> None:
    found = to_pair({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "tools": [TOOL]})
    assert not isinstance(found, str)
    assert found[0].tools == found[1].tools == [TOOL]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "answers are equal"),
        ({"context": "a", "response1": "b", "response2": "c", "overall_preference": 0}, "neither"),
        (
            {
                "prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 1.0,
                "score_rejected": 1.0,
            },
            "scores do not prefer",
        ),
        (
            {"instruction": "a", "completions": [{"response": "b", "overall_score": 1}]},
            "the same score",
        ),
    ],
)  # fmt: skip
def test_what_prefers_neither_answer_is_left_out_with_a_reason(
    data: dict[str, Any], why: str
) -> None:
    found = to_pair(data)
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"question": "a"}, "is no pair: it has question; give chosen and rejected"),
        ({"prompt": "a", "chosen": {}, "rejected": "b"}, "chosen: give text, or a list"),
        (
            {"prompt": "Other.", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
            "chosen: begins with a message of user that is not of the prompt",
        ),
        (
            {
                "prompt": "a",
                "chosen": "b",
                "rejected": "c",
                "score_chosen": "N/A",
                "score_rejected": 1,
            },
            "score_chosen: give a number, not 'N/A'",
        ),
        (
            {"context": "a", "response1": "b", "response2": "c", "overall_preference": "nan"},
            "overall_preference: give a number, not 'nan'",
        ),
        ({"chosen": "The sky is blue.", "rejected": "It is green."}, "chosen: is text without a"),
        ({"chosen": [ASKED, GOOD], "rejected": [asked(8), BAD]}, "chosen: begins otherwise"),
        (
            {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD, ASKED]},
            "rejected: ends with a message of user",
        ),
        (
            {"prompt": [ASKED], "chosen": [{"role": "assistant", "content": 5}], "rejected": [BAD]},
            r"chosen: messages\[1\]\.content",
        ),
        (
            {"context": "a", "response1": "b", "response2": "c", "overall_preference": "much"},
            "overall_preference: give a number, not 'much'",
        ),
        ({"instruction": "a", "completions": [{"response": "b"}]}, r"completions\[0\]: give an"),
    ],
)
def test_what_is_wrong_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        to_pair(data)
