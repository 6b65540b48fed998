"""20 Questions as a CrewAI flow: a player asks, an answerer who knows the secret word answers.

    ask -> answer -> referee (router) -> ask ... or over

The player is the model that learns. The answerer is another model at the same OpenAI endpoint. This
file uses CrewAI and one line of agentrl: ``emit_reward`` at the end, which does nothing outside
training. The environment says where the models are:

    OPENAI_BASE_URL, OPENAI_API_KEY   the endpoint
    PLAYER_MODEL                      default: $AGENTRL_MODEL, else gpt-4o-mini
    ANSWERER_MODEL                    default: answerer in training, else the player's model
    ANSWERER_BASE_URL                 default: the endpoint
    SEARCH_MODEL                      gives the player a search tool that asks this model
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any, Literal

from crewai import LLM, Agent
from crewai.flow.flow import Flow, listen, or_, router, start
from crewai.tools import tool
from crewai.utilities.types import LLMMessage
from crewai_core.printer import set_suppress_console_output
from openai import OpenAI
from pydantic import BaseModel

from agentrl import emit_reward

logging.getLogger("crewai.llms").setLevel(logging.ERROR)  # it warns that it cannot count tokens
CATEGORIES = "animal, clothing, food, furniture, instrument, place, tool, vehicle"


class Verdict(BaseModel):
    """The answerer's reply to one question."""

    brief_reason: str
    yes_or_no: Literal["yes", "no", "n/a"]
    correct: bool


class Turn(BaseModel):
    reply: str  # of the player, as it is
    answer: Literal["yes", "no", "n/a"]

    @property
    def question(self) -> str:
        return " ".join(self.reply.split())


class Game(BaseModel):
    """The state that the flow's methods share."""

    noun: str = ""
    target: str = ""
    reply: str = ""  # of the player, to which there is no answer yet
    turns: list[Turn] = []
    won: bool = False


@dataclass(frozen=True)
class Rules:
    """A variant of the game."""

    max_turns: int
    names_category: bool  # the player wins by naming the category; else the noun
    player: dict[str, Any]  # CrewAI's Agent
    max_tokens: int
    prompt: str = "{history}"
    system: str = ""  # then the game is one conversation, and each call continues it


FULL = Rules(
    max_turns=20,
    names_category=False,
    player={
        "role": "Player of 20 Questions",
        "goal": "Find the secret word with as few yes-or-no questions as possible",
        "backstory": f"The secret word is a well-known thing; it belongs to one of {CATEGORIES}.",
    },
    max_tokens=512,
    prompt="Ask your next yes-or-no question, or name the word: 'Is it a ...?'. Reply with the "
    "question only.\nYou have {left} questions left. So far:\n{history}",
)
# Only the words that agentrl-tiny was trained on: CrewAI's own prompts are left out.
SIMPLE = Rules(
    max_turns=3,
    names_category=True,
    player={
        "role": "Player",
        "goal": "-",
        "backstory": "-",
        "use_system_prompt": False,
        "system_template": "Guess my secret word. Ask a yes or no question.",
        "prompt_template": "History:\n{input}",
    },
    max_tokens=24,
)
# The same games for a model of some hundred million parameters. CrewAI's own prompts are too long
# for it, and 20 of them cost much: here the game is one conversation, and only its end is new.
CONVERSATION = {
    "role": "Player",
    "goal": "-",
    "backstory": "-",
    "use_system_prompt": False,
    "system_template": "Answer:",
    "prompt_template": "{input}",
}
SMALL_SIMPLE = Rules(
    max_turns=3,
    names_category=True,
    player=CONVERSATION,
    max_tokens=16,
    system="I think of a word. Is it an animal, clothing, food or a vehicle? Find out with three "
    "short yes-or-no questions.",
)
SMALL_FULL = Rules(
    max_turns=20,
    names_category=False,
    player=CONVERSATION,
    max_tokens=16,
    system="We play 20 Questions. I think of an animal, clothing, food, furniture, an instrument, "
    "a place, a tool or a vehicle. Ask short yes-or-no questions until you can name it.",
)


def conversation(rules: Rules, turns: list[tuple[str, str]]) -> list[LLMMessage]:
    """Return a game so far, with a message for each question and each answer."""
    said = ["Ask your first question.", *(answer for _, answer in turns)]
    messages: list[LLMMessage] = [{"role": "system", "content": rules.system}]
    for answer, (question, _) in zip(said, turns, strict=False):
        # CrewAI writes the last answer into its template; these have to read the same.
        messages.append({"role": "user", "content": f"Answer:\n{answer}"})
        messages.append({"role": "assistant", "content": question})
    return [*messages, {"role": "user", "content": said[-1]}]


def model(name: str, **settings: Any) -> LLM:
    """Return a model at the OpenAI endpoint, for any name."""
    return LLM(model=name, provider="openai", **settings)


def player_model() -> str:
    return os.environ.get("PLAYER_MODEL") or os.environ.get("AGENTRL_MODEL") or "gpt-4o-mini"


def answerer_llm() -> LLM:
    name = os.environ.get("ANSWERER_MODEL")
    if not name:
        name = "answerer" if "AGENTRL_ROLLOUT_ID" in os.environ else player_model()
    base_url = os.environ.get("ANSWERER_BASE_URL")
    return model(name, temperature=0.0, **({"base_url": base_url} if base_url else {}))


@tool("search")
def search(query: str) -> str:
    """Searches for things that fit a description, for instance 'a vehicle that can fly'."""
    answer = OpenAI().chat.completions.create(
        model=os.environ["SEARCH_MODEL"], messages=[{"role": "user", "content": query}]
    )
    return answer.choices[0].message.content or "Nothing found."


class TwentyQuestions(Flow[Game]):
    """One game. Start it with ``kickoff(inputs={"noun": ..., "target": ...})``."""

    _skip_auto_memory: bool = True  # it would load a vector database: 2 s in each process, unused
    rules: Rules
    player: Agent
    answerer: Agent

    def __init__(self, rules: Rules) -> None:
        tools = [search] if os.environ.get("SEARCH_MODEL") and rules is FULL else []
        player = Agent(
            llm=model(player_model(), max_tokens=rules.max_tokens), tools=tools, **rules.player
        )
        answerer = Agent(
            role="Answerer of 20 Questions",
            goal="Answer the player's question truthfully",
            backstory="You know the secret word; the player does not. Say n/a only where neither "
            "yes nor no would be true.",
            llm=answerer_llm(),
        )
        super().__init__(rules=rules, player=player, answerer=answerer)

    @start()
    def deal(self) -> None:
        """The state already holds the secret word."""

    @listen(or_(deal, "again"))
    async def ask(self) -> None:
        turns = [(turn.reply, turn.answer) for turn in self.state.turns]
        asked = conversation(self.rules, turns) if self.rules.system else self.prompt()
        try:
            self.state.reply = (await self.player.kickoff_async(asked)).raw
        except ValueError as error:
            if "None or empty" not in str(error):
                raise
            self.state.reply = ""  # CrewAI raises on an empty reply; it counts as a question

    def prompt(self) -> str:
        """Return the game so far in one message."""
        history = "\n".join(f"{turn.question} {turn.answer}" for turn in self.state.turns)
        left = self.rules.max_turns - len(self.state.turns)
        return self.rules.prompt.format(history=history or "none", left=left)

    @listen(ask)
    async def answer(self) -> None:
        turn = Turn(reply=self.state.reply, answer="n/a")
        secret = (
            f'The secret word is "{self.state.noun}". The player wins by naming '
            f'"{self.state.target}": correct is true only if the question does.\n'
            f"Question: {turn.question}"
        )
        reply = await self.answerer.kickoff_async(secret, response_format=Verdict)
        verdict = reply.pydantic
        if not isinstance(verdict, Verdict):
            raise ValueError(f"the answerer gave no verdict: {reply.raw!r}")
        turn.answer = verdict.yes_or_no
        self.state.turns.append(turn)
        self.state.won = verdict.correct

    @router(answer)
    def referee(self) -> Literal["again", "over"]:
        over = self.state.won or len(self.state.turns) >= self.rules.max_turns
        return "over" if over else "again"

    @listen("over")
    def score(self) -> None:
        emit_reward(1.0 if self.state.won else 0.0)


async def play(task: dict[str, Any], rules: Rules) -> Game:
    """Play one game.

    Raises:
        ValueError: the answerer's reply was no verdict.
    """
    set_suppress_console_output(True)  # CrewAI frames every step; the transcript says it shorter
    game = TwentyQuestions(rules)
    target = task["category" if rules.names_category else "noun"]
    await game.kickoff_async(inputs={"noun": task["noun"], "target": target})
    return game.state


async def agent(task: dict[str, Any], rules: Rules = FULL) -> None:
    """The whole game: 20 questions, the noun itself, CrewAI's own prompts."""
    game = await play(task, rules)
    for turn in game.turns:
        print(f"{turn.question} {turn.answer}")
    print(f"{game.noun}: {'won' if game.won else 'lost'}")


async def simple(task: dict[str, Any]) -> None:
    """The game for a tiny model: few questions, the noun's category, a bare prompt."""
    await agent(task, SIMPLE)


async def small(task: dict[str, Any]) -> None:
    """The whole game with short prompts."""
    await agent(task, SMALL_FULL)


async def small_simple(task: dict[str, Any]) -> None:
    """The simple game with prompts for a pretrained model."""
    await agent(task, SMALL_SIMPLE)
