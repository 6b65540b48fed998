"""Messages in orders that clients send and chat templates refuse: the published templates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from family_templates import published

from agentrl_proxy.errors import ApiError
from agentrl_proxy.rendering.continuity import Conversations, remember_reply, render_prompt
from agentrl_proxy.rendering.renderer import Renderer

REFUSING = ["qwen3_5_think", "qwen3_6", "qwen3_8", "gemma", "gemma3", "cohere", "gptoss"]
CODEX = ["system", "developer", "user", "user"]


def speaker(tokenizer: Any, family: str) -> Renderer:
    own = copy.deepcopy(tokenizer)
    own.chat_template = published(family)
    return Renderer(own)


def messages(roles: list[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{role} says {i}."} for i, role in enumerate(roles)]


@pytest.mark.parametrize("family", [*REFUSING, "qwen2_5", "qwen3", "llama3_1"])
@pytest.mark.parametrize(
    "roles", [CODEX, ["system", "user", "assistant", "system", "user"], ["user", "system"]]
)
def test_every_message_is_told_in_its_order(tokenizer: Any, family: str, roles: list[str]) -> None:
    if family == "llama3_1":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.bos_token = "<|im_start|>"
    asked = messages(roles)
    renderer = speaker(tokenizer, family)
    text = renderer.text(renderer.normalize(asked), None)
    places = [text.find(message["content"]) for message in asked]
    assert -1 not in places
    assert places == sorted(places)


def test_templates_that_take_them_get_them_as_sent(tokenizer: Any) -> None:
    asked = messages(["system", "system", "user", "user", "assistant", "system", "user"])
    assert speaker(tokenizer, "qwen3").normalize(asked) == asked


def test_leading_system_messages_are_one_and_later_ones_the_users(tokenizer: Any) -> None:
    asked = messages(["system", "system", "user", "user", "assistant", "system", "user"])
    qwen = [(one["role"], one["content"]) for one in speaker(tokenizer, "qwen3_6").normalize(asked)]
    assert qwen[0] == ("system", "system says 0.\n\nsystem says 1.")
    assert [role for role, _ in qwen[1:]] == ["user", "user", "assistant", "user", "user"]
    gemma = [(one["role"], one["content"]) for one in speaker(tokenizer, "gemma3").normalize(asked)]
    assert [role for role, _ in gemma] == ["system", "user", "assistant", "user"]
    assert gemma[3][1] == "system says 5.\n\nuser says 6."
    assert speaker(tokenizer, "gemma").normalize(asked)[0]["role"] == "user"


@pytest.mark.parametrize("family", ["gemma", "gemma3", "cohere"])
def test_such_a_conversation_continues_its_exact_tokens(tokenizer: Any, family: str) -> None:
    renderer, known = speaker(tokenizer, family), Conversations()
    asked = messages(CODEX)
    first = render_prompt(renderer, known, asked, None, "policy")
    said = renderer.encode("An answer.")
    reply = {"role": "assistant", "content": "An answer."}
    remember_reply(renderer, known, first, reply, said, "An answer.", cut=False)
    later = [*asked, reply, *messages(["system", "user"])]
    second = render_prompt(renderer, known, later, None, "policy")
    assert second.continues is not None
    assert second.branched is None
    assert second.ids[: len(first.ids) + len(said)] == [*first.ids, *said]
    assert second.text.count("user says 1.") == 1


def test_a_template_that_would_leave_a_message_out_writes_it(tokenizer: Any) -> None:
    cohere = speaker(tokenizer, "cohere2")
    text = cohere.text(cohere.normalize(messages(CODEX)), None)
    assert all(message["content"] in text for message in messages(CODEX))


def test_other_refusals_reach_the_client(tokenizer: Any) -> None:
    gemma = speaker(tokenizer, "gemma3")
    with pytest.raises(ApiError, match="chat template refused the messages"):
        gemma.render(messages(["user", "assistant", "assistant"]))
