"""Write the catalog and the questions: catalog.json, train.jsonl, dev.jsonl and held_out.jsonl.

    python examples/catalog/make_tasks.py

Prices, stocks, weights and shelves are invented, so they must be looked up. The things of one file
(tents, kettles) are in no other. Half of the questions of dev and held_out are phrased in ways that
occur nowhere in training ("phrasing": "new").
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
COUNT = {"train": 600, "dev": 48, "held_out": 96}
COLORS = str.split("red blue green yellow black white orange gray brown pink")
THINGS = {
    "train": str.split(
        "tent kettle jacket lamp chair table backpack bottle towel blanket pillow mirror "
        "clock basket bucket ladder hammer helmet scarf sweater wallet suitcase umbrella vase "
        "candle curtain drawer bicycle"
    ),
    "dev": str.split("sofa teapot hat belt guitar carpet racket shovel"),
    "held_out": str.split("bench mug coat cooler kayak drill toaster sled tripod apron"),
}

# Of each field: training's phrasings, then the new ones of dev and of held_out.
PHRASINGS = {
    "price": {
        "train": [
            "How much is the {color} {thing}?",
            "What do the {color} {thing}s cost?",
            "I like this {thing} in {color}. What is the price?",
            "Hi, could you tell me what you charge for a {color} {thing}?",
            "My sister saw a {thing} here, the {color} one. How many dollars is it?",
        ],
        "dev": [
            "What would I pay for one {color} {thing}?",
            "{color} {thing}: how expensive is it?",
        ],
        "held_out": [
            "Is the {color} {thing} cheap? What do you want for it?",
            "I would take the {thing} if it comes in {color}. How much money do I need?",
        ],
    },
    "stock": {
        "train": [
            "How many {color} {thing}s do you have?",
            "Is the {color} {thing} in stock? How many?",
            "We need a few {thing}s, all {color}. How many are there?",
            "How many pieces of the {color} {thing} are left?",
            "Please count the {thing}s for me, only the {color} ones.",
        ],
        "dev": [
            "What is your stock of {color} {thing}s?",
            "Are there still {thing}s in {color}, and how many of them?",
        ],
        "held_out": [
            "Our club wants {color} {thing}s. How many can you sell us?",
            "How large is the supply of this {thing}, the {color} version?",
        ],
    },
    "weight": {
        "train": [
            "How heavy is the {color} {thing}?",
            "What does a {color} {thing} weigh?",
            "I have to carry the {thing} home, the {color} one. What is its weight?",
            "How many kilos is the {color} {thing}?",
            "For the parcel: what is the weight of one {thing} in {color}?",
        ],
        "dev": [
            "Can a child lift the {color} {thing}? How many kg is it?",
            "Tell me the weight of your {thing}, {color} please.",
        ],
        "held_out": [
            "I will ship one {color} {thing}. How much does it weigh?",
            "Is the {thing} light? I mean the {color} one. How many kilograms?",
        ],
    },
    "shelf": {
        "train": [
            "Where is the {color} {thing}?",
            "On which shelf do I find the {color} {thing}s?",
            "I am looking for a {thing}, a {color} one. Which shelf?",
            "Which shelf holds the {color} {thing}?",
            "Where did you put the {thing}s? I want a {color} one.",
        ],
        "dev": [
            "Show me where the {color} {thing}s are.",
            "At which shelf should I look for a {thing} in {color}?",
        ],
        "held_out": [
            "Excuse me, where can I see your {color} {thing}s?",
            "I cannot find the {thing}, the {color} one. What shelf is it on?",
        ],
    },
}


def main() -> None:
    rng = random.Random(0)
    things = [thing for name in COUNT for thing in THINGS[name]]
    catalog = {f"{color} {thing}": sheet(rng) for thing in things for color in COLORS}
    (HERE / "catalog.json").write_text(json.dumps(catalog, indent=0) + "\n")
    for name, count in COUNT.items():
        tasks = [task(rng, catalog, name, i) for i in range(count)]
        rng.shuffle(tasks)
        lines = "".join(json.dumps(one) + "\n" for one in tasks)
        (HERE / f"{name}.jsonl").write_text(lines)


def sheet(rng: random.Random) -> dict[str, str]:
    """Four values, all different, so that an answer tells which one was read."""
    price, stock, weight = rng.sample(range(2, 60), 3)
    shelf = f"{rng.choice('ABCDEFGH')}{rng.randrange(1, 10)}"
    return {"price": str(price), "stock": str(stock), "weight": str(weight), "shelf": shelf}


def task(rng: random.Random, catalog: dict[str, dict], name: str, i: int) -> dict[str, str]:
    field = list(PHRASINGS)[i % 4]
    new = name != "train" and i // 4 % 2 == 1
    color, thing = rng.choice(COLORS), rng.choice(THINGS[name])
    phrasing = rng.choice(PHRASINGS[field][name if new else "train"])
    question = phrasing.format(color=color, thing=thing).replace(" a orange", " an orange")
    product = f"{color} {thing}"
    made = {
        "question": question[0].upper() + question[1:],
        "name": product,
        "value": catalog[product][field],
    }
    return made if name == "train" else {**made, "phrasing": "new" if new else "known"}


if __name__ == "__main__":
    main()
