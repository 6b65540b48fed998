"""Two roles answer a customer: a *searcher* names the product, an *answerer* reads its sheet.

The searcher turns the question into the product's name in the catalog, and the program looks it up.
The answerer sees the question and the sheet that was found; without a sheet it is not asked. One
reward counts for both. Each asks for a model of its own name, so each trains its own adapter.

It uses only the OpenAI API and ``emit_reward``. Run it against any OpenAI endpoint:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... SEARCHER=gpt-4o-mini ANSWERER=gpt-4o-mini \
        python examples/catalog/agent.py
"""

import json
import os
import re
from pathlib import Path

from openai import OpenAI

from agentrl import emit_reward

SEARCHER = os.environ.get("SEARCHER", "searcher")
ANSWERER = os.environ.get("ANSWERER", "answerer")
CATALOG = json.loads((Path(__file__).parent / "catalog.json").read_text())

# Worked examples. Their colors and things are not in the catalog.
SEARCHES = [
    ("How much are the purple lanterns?", "purple lantern"),
    ("I need a stool, the beige one. Is it heavy?", "beige stool"),
]
ANSWERS = [
    (
        "purple lantern: price 31 dollars, stock 8, weight 2 kg, shelf C4\n"
        "How much are the purple lanterns?",
        "The purple lantern costs 31 dollars.",
    ),
    (
        "beige stool: price 58 dollars, stock 17, weight 6 kg, shelf A9\n"
        "I need a stool, the beige one. Is it heavy?",
        "The beige stool weighs 6 kg.",
    ),
]


def agent(task: dict) -> None:
    question = task["question"]
    name = ask(SEARCHER, "Write the name of the product, in the singular.", SEARCHES, question)
    sheet = find(name)
    answer = ""
    if sheet is not None:
        told = f"{sheet}\n{question}"
        answer = ask(ANSWERER, "Answer the question in one short sentence.", ANSWERS, told)
    emit_reward(score(sheet is not None and sheet == find(task["name"]), answer, task["value"]))
    print(f"{question} searcher: {name!r}, answerer: {answer!r}")


def ask(model: str, instruction: str, shown: list[tuple[str, str]], text: str) -> str:
    messages = [{"role": "system", "content": instruction}]
    for question, reply in shown:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": text})
    answer = OpenAI().chat.completions.create(model=model, messages=messages)
    return answer.choices[0].message.content or ""


def find(name: str) -> str | None:
    """Return the sheet of the product with exactly this name, in any case."""
    name = name.strip(" \n.").lower()
    sheet = CATALOG.get(name)
    if sheet is None:
        return None
    price, stock, weight, shelf = (sheet[key] for key in ("price", "stock", "weight", "shelf"))
    return f"{name}: price {price} dollars, stock {stock}, weight {weight} kg, shelf {shelf}"


def score(found: bool, answer: str, value: str) -> float:
    """Return 1 if the answer has the value and no other, 0.2 for the right sheet alone, else 0."""
    if not found:
        return 0.0
    return 1.0 if set(re.findall(r"[A-Z]?\d+", answer)) == {value} else 0.2


if __name__ == "__main__":
    price = CATALOG["red tent"]["price"]
    agent({"question": "What do you want for the red tent?", "name": "red tent", "value": price})
