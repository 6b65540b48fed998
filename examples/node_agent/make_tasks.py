"""Write the tasks. No name and no age of the held-out tasks is among the training ones."""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
NAMES = str.split(
    "Alice Bob Carol David Emma Frank Grace Henry Iris Jack Kate Leo Maria Nina Oscar Paul Quinn "
    "Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Anna Ben Clara Daniel Elena Felix Hugo Julia"
)


def main() -> None:
    rng = random.Random(0)
    write("train.jsonl", rng, NAMES[:26], range(10, 98, 2), 160)
    write("held_out.jsonl", rng, NAMES[26:], range(11, 99, 2), 24)


def write(file: str, rng: random.Random, names: list[str], ages: range, count: int) -> None:
    tasks = [{"name": rng.choice(names), "age": rng.choice(ages)} for _ in range(count)]
    (HERE / file).write_text("".join(json.dumps(task) + "\n" for task in tasks))


if __name__ == "__main__":
    main()
