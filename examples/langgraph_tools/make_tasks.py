"""Write the example's database, training tasks and held-out tasks.

The populations are invented: no model can answer without looking them up. No sum and no city of the
held-out tasks is among the training tasks.
"""

import json
import operator
import random
import sqlite3
from pathlib import Path

HERE = Path(__file__).parent
CITIES = str.split(
    "Paris London Berlin Rome Madrid Tokyo Cairo Lima Oslo Vienna Dublin Athens Delhi Boston "
    "Chicago Prague Warsaw Lisbon Zurich Seoul Sydney Toronto Nairobi Hamburg Munich Geneva"
)
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def main() -> None:
    rng = random.Random(0)
    population = {city: rng.randrange(100, 1000) for city in CITIES}
    (HERE / "cities.db").unlink(missing_ok=True)
    with sqlite3.connect(HERE / "cities.db") as db:
        db.execute("CREATE TABLE cities (name TEXT PRIMARY KEY, population INTEGER)")
        db.executemany("INSERT INTO cities VALUES (?, ?)", population.items())
    write("train.jsonl", tasks(rng, population, CITIES[:18], parity=0, sums=200, lookups=18))
    write("held_out.jsonl", tasks(rng, population, CITIES[18:], parity=1, sums=32, lookups=8))


def tasks(
    rng: random.Random,
    population: dict[str, int],
    cities: list[str],
    *,
    parity: int,
    sums: int,
    lookups: int,
) -> list[dict]:
    made = []
    for i in range(sums):
        # x + y is even in training tasks and odd in held-out ones.
        x, y = rng.randrange(10, 100), rng.randrange(10, 100)
        y += (x + y + parity) % 2
        sign, apply = list(SIGNS.items())[i % len(SIGNS)]
        made.append({"question": f"Work out {x} {sign} {y}.", "answer": str(apply(x, y))})
    for city in cities[:lookups]:
        question = f"Population of {city}?"
        made += [{"question": question, "answer": str(population[city])}] * (sums // 2 // lookups)
    rng.shuffle(made)
    return made


def write(name: str, made: list[dict]) -> None:
    (HERE / name).write_text("".join(json.dumps(task) + "\n" for task in made))


if __name__ == "__main__":
    main()
