"""Write the tasks: word problems of two operations. Held-out ones are never used for tuning.

Half of the dev and the held-out problems are stories of the training set with other numbers, names
and things; the other half are stories that occur in no other file.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Story:
    """``signs``: the two operations, on a and b and then on the result and c."""

    text: str
    signs: str


TRAIN = [
    Story("A farm has {a} rows of {b} trees. {c} trees are cut. How many are left?", "*-"),
    Story("{name} has {a} boxes of {b} {things} and {c} more. How many {things} is that?", "*+"),
    Story("A shop sells {a} {things} on Monday and {b} on Tuesday. Each costs {c} dollars. "
          "How many dollars does it take?", "+*"),
    Story("{name} has {a} {things} and loses {b}. The others sell for {c} dollars each. "
          "How many dollars is that?", "-*"),
    Story("A train has {a} passengers. {b} get on and {c} get off. How many are on it now?", "+-"),
    Story("{name} has {a} {things}, gives away {b} and finds {c}. How many are there now?", "-+"),
    Story("{a} trucks bring {b} crates each, with {c} {things} in a crate. "
          "How many {things} is that?", "**"),
    Story("{name} counts {a} red, {b} green and {c} blue {things}. How many is that?", "++"),
    Story("{name} puts {a} old and {b} new {things} into {c} equal bags. "
          "How many are in a bag?", "+/"),
    Story("Of {a} {things}, {b} are broken. The others go to {c} shops in equal parts. "
          "How many does a shop get?", "-/"),
    Story("{a} crates of {b} {things} are shared by {c} families. How many does each get?", "*/"),
    Story("A barrel holds {a} liters. {b} leak out and {c} are drunk. "
          "How many liters are left?", "--"),
]  # fmt: skip
DEV = [
    Story("{name} reads {a} pages a day for {b} days. The book has {c} pages more. "
          "How long is the book?", "*+"),
    Story("A town of {a} people loses {b} to the city. Then {c} come. How many live there?", "-+"),
    Story("{a} boys and {b} girls each plant {c} {things}. How many do they plant?", "+*"),
    Story("A tank has {a} gallons. {name} uses {b} in May and {c} in June. "
          "How many gallons remain?", "--"),
]  # fmt: skip
HELD_OUT = [
    Story("{name} earns {a} dollars a week for {b} weeks and spends {c}. "
          "How many dollars remain?", "*-"),
    Story("A hall has {a} seats. {b} are taken and {c} more get free. How many are free?", "-+"),
    Story("A factory makes {a} {things} by day and {b} by night. "
          "How many does it make in {c} days?", "+*"),
    Story("{name} saves {a} dollars, then {b}, and pays {c} for a coat. "
          "How many dollars are left?", "+-"),
]  # fmt: skip
NAMES = str.split(
    "Alice Bob Carol David Emma Frank Grace Henry Iris Jack Kate Leo Maria Nina Oscar Paul Quinn "
    "Rosa Sam Tina Uma Victor Wendy Yara"
)
THINGS = str.split(
    "apples books cups dolls eggs flowers hats keys lamps melons pens plates roses shirts stamps "
    "tiles tulips watches bottles bricks candles chairs coins pears"
)


def numbers(rng: random.Random, signs: str) -> tuple[int, int, int, int, int]:
    """Return a, b, c and both results: whole, positive, too large to work out in the head."""
    while True:
        factors = range(12, 100)
        terms = range(102, 1000)
        a, b = rng.choices(factors if signs[0] == "*" else terms, k=2)
        first = {"*": a * b, "+": a + b, "-": a - b}[signs[0]]
        if signs[1] == "/":
            c = rng.randrange(3, 40)
            if first % c:
                continue
        else:
            c = rng.choice(factors if signs[1] == "*" else terms)
        result = {"*": first * c, "+": first + c, "-": first - c, "/": first // c}[signs[1]]
        if first > 20 and result > 20:
            return a, b, c, first, result


def tasks(rng: random.Random, stories: list[Story], part: int, count: int, **note: str) -> list:
    """Make ``count`` problems with names and things of one of three parts, all stories in turn."""
    made = []
    for i in range(count):
        story = stories[i % len(stories)]
        a, b, c, between, answer = numbers(rng, story.signs)
        name, things = rng.choice(NAMES[part::3]), rng.choice(THINGS[part::3])
        question = story.text.format(a=a, b=b, c=c, name=name, things=things)
        steps = [f"{a} {story.signs[0]} {b}", f"{between} {story.signs[1]} {c}"]
        made.append({"question": question, "answer": str(answer), "steps": steps, **note})
    return made


def write(name: str, made: list, rng: random.Random) -> None:
    rng.shuffle(made)
    (HERE / name).write_text("".join(json.dumps(task) + "\n" for task in made))


def main() -> None:
    rng = random.Random(0)
    write("train.jsonl", tasks(rng, TRAIN, 0, 600), rng)
    for name, stories, part in (("dev", DEV, 1), ("held_out", HELD_OUT, 2)):
        known = tasks(rng, TRAIN, part, 48, story="known")
        write(f"{name}.jsonl", known + tasks(rng, stories, part, 48, story="new"), rng)


if __name__ == "__main__":
    main()
