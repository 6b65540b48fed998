"""A LangGraph agent that turns a short text into a JSON record, without a grammar.

Two nodes: ``extract`` asks the model for a record, ``check`` compares it with the schema. A record
that does not fit goes back to the model once, with the reason. Orders, appointments and contact
notes have schemas of their own.

It uses only LangChain, LangGraph and ``emit_reward``. Run it against any OpenAI endpoint:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/extraction/agent.py
"""

import json
import os
from typing import Annotated

from langchain.chat_models import init_chat_model
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl import emit_reward

TRIES = 2


class Form(BaseModel):
    """A record. Strict: "3" is no integer, and a key too many is an error."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Order(Form):
    customer: str
    item: str
    quantity: int
    total: float


class Appointment(Form):
    person: str
    place: str
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    time: Annotated[str, Field(pattern=r"^\d\d:\d\d$")]


class Contact(Form):
    name: str
    company: str
    phone: str
    email: str


FORMS: dict[str, type[Form]] = {"order": Order, "appointment": Appointment, "contact": Contact}

# One worked example a form. None of its values occurs in a task.
SHOWN = {
    "order": (
        "Tobias Lindqvist bought two wool blankets, $58.00 in all.",
        '{"customer": "Tobias Lindqvist", "item": "wool blankets", "quantity": 2, "total": 58.0}',
    ),
    "appointment": (
        "Tobias Lindqvist comes to the Old Mill on 8 January 2024 at 4:45 pm.",
        '{"person": "Tobias Lindqvist", "place": "Old Mill", '
        '"date": "2024-01-08", "time": "16:45"}',
    ),
    "contact": (
        "Tobias Lindqvist, Zephyr Tools, 555-9031, lindqvist@zephyr.example",
        '{"name": "Tobias Lindqvist", "company": "Zephyr Tools", "phone": "555-9031", '
        '"email": "lindqvist@zephyr.example"}',
    ),
}


class State(MessagesState):
    form: str
    fits: bool
    tries: int


def extract(state: State) -> dict:
    model = init_chat_model(f"openai:{os.environ.get('AGENTRL_MODEL', 'gpt-4o-mini')}")
    answer = model.invoke(state["messages"])
    return {"messages": [answer], "tries": state["tries"] + 1}


def check(state: State) -> dict:
    try:
        FORMS[state["form"]].model_validate_json(state["messages"][-1].text)
    except ValidationError as problem:
        error = problem.errors()[0]
        where = ".".join(map(str, error["loc"])) or "answer"
        correction = f"Wrong {where}: {error['msg']}. Write the JSON object again."
        return {"messages": [HumanMessage(correction)], "fits": False}
    return {"fits": True}


def after_check(state: State) -> str:
    return END if state["fits"] or state["tries"] == TRIES else "extract"


def prompt(form: str, text: str) -> list:
    """Instructions, one worked example, the text."""
    keys = ", ".join(FORMS[form].model_fields)
    shown, record = SHOWN[form]
    return [
        SystemMessage(f"Read the text and answer with one JSON object with the keys {keys}."),
        HumanMessage(shown),
        AIMessage(record),
        HumanMessage(text),
    ]


def build() -> StateGraph:
    graph = StateGraph(State)
    graph.add_node("extract", extract)
    graph.add_node("check", check)
    graph.add_edge(START, "extract")
    graph.add_edge("extract", "check")
    graph.add_conditional_edges("check", after_check, ["extract", END])
    return graph


def agent(task: dict) -> None:
    start = {
        "messages": prompt(task["form"], task["text"]),
        "form": task["form"],
        "fits": False,
        "tries": 0,
    }
    end = build().compile().invoke(start)
    reply = [message for message in end["messages"] if isinstance(message, AIMessage)][-1].text
    emit_reward(score(reply, task["form"], task["record"]))
    print(f"{task['text']}\n{reply}")


def score(reply: str, form: str, record: dict) -> float:
    """0.1 for a JSON object, 0.1 more if it fits the schema, and 0.8 × the share of right values.

    So 1 is a record in which everything is right.
    """
    try:
        answer = json.loads(reply)
    except ValueError:
        return 0.0
    if not isinstance(answer, dict):
        return 0.0
    try:
        FORMS[form].model_validate_json(reply)
        fits = True
    except ValidationError:
        fits = False
    right = sum(same(answer.get(key), value) for key, value in record.items())
    return round(0.1 + 0.1 * fits + 0.8 * right / len(record), 4)


def same(answer: object, value: str | float) -> bool:
    """Compare a value with the right one: text without regard to case, numbers by value."""
    if isinstance(value, str):
        return isinstance(answer, str) and answer.casefold() == value.casefold()
    return isinstance(answer, int | float) and not isinstance(answer, bool) and answer == value


if __name__ == "__main__":
    agent(
        {
            "form": "order",
            "text": "Order 81: Ada Byron takes 3 desk lamps for $74.50.",
            "record": {"customer": "Ada Byron", "item": "desk lamps", "quantity": 3, "total": 74.5},
        }
    )
