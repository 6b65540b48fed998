"""A ReAct agent in plain text: a LangGraph graph of a model and a pocket calculator.

    START -> model -> calculator -> model ... -> END

The model writes "Action: calculator[...]", reads the "Observation: ...", and ends with "Final
Answer: ...". No chat template with tools is needed. The calculator does one operation at a time, so
a word problem of two operations takes three turns. The reward is 1 for the right final answer.

It uses only LangChain, LangGraph and ``emit_reward``. Run it against any OpenAI endpoint:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/react_tools/agent.py
"""

import operator
import os
import re
from pathlib import Path
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph

from agentrl import emit_reward

HERE = Path(__file__).parent
EXAMPLE = [
    SystemMessage(
        "Solve the problem with the calculator. It does one operation (+ - * /) on two numbers. "
        "Reply with 'Action: calculator[...]' or 'Final Answer: ...'."
    ),
    HumanMessage("Tom has 34 bags of 27 nuts. He eats 61 nuts. How many nuts are left?"),
    AIMessage("Thought: multiply.\nAction: calculator[34 * 27]"),
    HumanMessage("Observation: 918"),
    AIMessage("Thought: subtract.\nAction: calculator[918 - 61]"),
    HumanMessage("Observation: 857"),
    AIMessage("Thought: done.\nFinal Answer: 857"),
]
MAX_TURNS = 5
ACTION = re.compile(r"^Action: *calculator\[(.*)\]", re.MULTILINE)
FINAL = re.compile(r"^Final Answer: *[^\d\n]{0,30}?(-?\d[\d,]*)", re.MULTILINE)
OPERATION = re.compile(r" *(-?\d+) *([-+*/]) *(-?\d+) *")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def calculate(expression: str) -> str:
    """Return the result of one operation on two whole numbers, or what is wrong with it."""
    match = OPERATION.fullmatch(expression)
    if not match:
        return "error: one operation on two numbers, such as 12 * 34"
    left, sign, right = int(match[1]), match[2], int(match[3])
    if sign == "/" and (right == 0 or left % right):
        return "error: no whole number"
    return str(OPERATORS[sign](left, right))


def score(reply: str, answer: str) -> float:
    """Return 1 if the first number of the final answer is the right one, else 0."""
    match = FINAL.search(reply)
    return 1.0 if match and match[1].replace(",", "") == answer else 0.0


def call_model(state: MessagesState) -> dict:
    llm = ChatOpenAI(model=os.environ.get("AGENTRL_MODEL", "gpt-4o-mini"))
    return {"messages": [llm.invoke(state["messages"], stop=["\nObservation"])]}


def call_calculator(state: MessagesState) -> dict:
    expression = ACTION.search(state["messages"][-1].text)[1]
    return {"messages": [HumanMessage(f"Observation: {calculate(expression)}")]}


def next_node(state: MessagesState) -> Literal["calculator", "__end__"]:
    """An action goes to the calculator. A final answer ends, as does what is neither."""
    return "calculator" if ACTION.search(state["messages"][-1].text) else END


def build() -> StateGraph:
    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("calculator", call_calculator)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", next_node)
    graph.add_edge("calculator", "model")
    return graph


GRAPH = build().compile()


def agent(task: dict) -> None:
    messages = [*EXAMPLE, HumanMessage(task["question"])]
    try:
        end = GRAPH.invoke({"messages": messages}, {"recursion_limit": 2 * MAX_TURNS})
        messages = end["messages"]
        reply = messages[-1].text
    except GraphRecursionError:
        reply = ""  # it never stops calculating
    emit_reward(score(reply, task["answer"]))
    for message in messages[len(EXAMPLE) :]:
        print(message.text)


if __name__ == "__main__":
    problem = "A farm has 47 rows of 38 trees. 215 trees are cut. How many are left?"
    agent({"question": problem, "answer": "1571"})
