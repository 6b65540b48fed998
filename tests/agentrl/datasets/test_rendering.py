"""A chat's rows are those that the gateway records of a rollout which says the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_data import TOOL, clerk, game
from family_templates import FAMILIES
from running_gateway import running
from scripted_sampler import Running

from agentrl.datasets.chats import Chat, to_chat
from agentrl.datasets.rendering import chat_rows
from agentrl.history.export import paths_of
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import Json
from agentrl_trainer.data.training_row import TrainingRow, to_training_row
from agentrl_trainer.models.loading import load_facts


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_facts("agentrl-tiny").tokenizer)


@pytest.fixture
def gateway(renderer: Renderer, tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, renderer, {}) as found:
        yield found


def chat(data: Json) -> Chat:
    return to_chat(data)


def played(gateway: Running, told: Sequence[Json], tools: list[Json] | None) -> list[Json]:
    """Play a conversation whose answers the policy says; return it as the agent has it."""
    claim = gateway.claims[0]
    client = openai.OpenAI(base_url=gateway.base_url(claim), api_key=claim.key)
    said: list[Json] = []
    for message in told:
        if message["role"] != "assistant":
            said.append(message)
            continue
        asked: Any = {"model": "policy", "messages": said} | ({"tools": tools} if tools else {})
        answer = client.chat.completions.create(**asked).choices[0].message
        said.append(json.loads(answer.model_dump_json(exclude_none=True)))
    return said


def recorded(gateway: Running) -> list[TrainingRow]:
    calls = gateway.store.calls(attempt_ids=[gateway.claims[0].attempt_id])
    paths = paths_of(calls, imitated=False)
    return [to_training_row(path, dict.fromkeys(path.call_ids, 1.0)) for path in paths]


LONG = {
    "messages": [
        {"role": "system", "content": "You are a clerk."},
        *clerk(41)["messages"],
        {"role": "user", "content": " And item 5?\n"},
        *clerk(5)["messages"][1:3],
        {"role": "assistant", "content": "6 grüße 👍, 7."},
    ],
    "tools": [TOOL],
}


@pytest.mark.parametrize("data", [game(417), clerk(7), LONG])
def test_a_row_has_the_tokens_of_the_recorded_rollout(
    data: Json, gateway: Running, renderer: Renderer
) -> None:
    given = chat(data)
    answers = [one for one in given.messages if one["role"] == "assistant"]
    texts = iter([_as_said(renderer, answer) for answer in answers])
    gateway.sampler.script = lambda *_: next(texts)
    seen = played(gateway, given.messages, given.tools)
    ours, theirs = chat_rows(renderer, given, "all"), recorded(gateway)
    assert len(ours) == len(theirs) == 1
    assert (ours[0].tokens, ours[0].mask) == (theirs[0].tokens, theirs[0].mask)
    assert ours[0].advantages == theirs[0].advantages
    # Also from the messages as the agent has got them.
    assert chat_rows(renderer, chat({"messages": seen, "tools": data.get("tools")}), "all") == ours


def _as_said(renderer: Renderer, answer: Json) -> str:
    asked = [{"role": "user", "content": "x"}]
    whole = renderer.text(renderer.normalize([*asked, answer]), None, generate=False)
    return whole.removeprefix(renderer.text(asked, None)).removesuffix(renderer.turn_end)


def test_which_answers_train_and_with_what_weight(renderer: Renderer) -> None:
    first, second = game(1)["messages"], game(2)["messages"]

    def trained(train_on: Any, **weight: Any) -> list[tuple[str, float]]:
        given = chat({"messages": [*first, second[0], {**second[1], **weight}]})
        return [
            (renderer.decode([token]), weight)
            for row in chat_rows(renderer, given, train_on)
            for token, weight, on in zip(row.tokens, row.advantages, row.mask, strict=True)
            if on
        ]

    def text(found: list[tuple[str, float]]) -> str:
        return "".join(piece for piece, _ in found)

    assert text(trained("all")) == "I am 1.I am 2."
    assert text(trained("all", weight=0)) == "I am 1."
    assert text(trained("last")) == text(trained("tagged", weight=1)) == "I am 2."
    assert {weight for _, weight in trained("last", weight=0.25)} == {0.25}
    assert trained("tagged") == trained("last", weight=0) == []


THOUGHT = {
    "messages": [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "reasoning_content": "two", "content": "2."},
        {"role": "user", "content": "3?"},
        {"role": "assistant", "reasoning_content": "three", "content": "3."},
    ]
}


@pytest.mark.parametrize(("family", "opening"), [("qwen3", "<think>\n"), ("deepseek-r1", "")])
def test_where_a_template_strips_thoughts_a_new_row_begins(family: str, opening: str) -> None:
    renderer = Renderer(FAMILIES[family].tokenizer(load_facts("agentrl-tiny").tokenizer))
    rows = chat_rows(renderer, chat(THOUGHT), "all")
    said = [[t for t, on in zip(row.tokens, row.mask, strict=True) if on] for row in rows]
    assert [renderer.decode_raw(one[:-1]) for one in said] == [
        f"{opening}two\n</think>\n\n2.",
        f"{opening}three\n</think>\n\n3.",
    ]
    assert "two" not in renderer.decode_raw(rows[1].tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_say_an_answer_and_a_call(family: str) -> None:
    renderer = Renderer(FAMILIES[family].tokenizer(load_facts("agentrl-tiny").tokenizer))
    rows = chat_rows(renderer, chat(clerk(7)), "all")
    said = [t for row in rows for t, on in zip(row.tokens, row.mask, strict=True) if on]
    assert FAMILIES[family].said(("price", '{"item": 7}')) in renderer.decode_raw(said)
    assert renderer.is_stop(said[-1])


def test_base_models_without_a_template_write_roles_and_colons(
    tmp_path: Path,
) -> None:
    renderer = Renderer(load_facts("agentrl-tiny", chat_template="role_colon").tokenizer)
    given = chat({"messages": [{"role": "system", "content": "Play."}, *game(7)["messages"] * 2]})
    with running(tmp_path, renderer, {}) as gateway:
        gateway.sampler.script = lambda *_: " I am 7."
        played(gateway, given.messages, None)
        [row], [theirs] = chat_rows(renderer, given, "all"), recorded(gateway)
    assert (row.tokens, row.mask) == (theirs.tokens, theirs.mask)
    asked, end = game(7)["messages"][0]["content"], renderer.tokenizer.eos_token
    turn = f"User: {asked}\n\nAssistant: I am 7.{end}"
    assert renderer.decode_raw(row.tokens) == f"System: Play.\n\n{turn}\n\n{turn}"


def test_an_answer_that_nothing_asks_for_is_refused(renderer: Renderer) -> None:
    with pytest.raises(ValueError, match=r"messages\[0\]: an answer"):
        chat_rows(renderer, chat({"messages": game(7)["messages"][1:]}), "all")
