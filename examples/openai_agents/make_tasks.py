"""Write the tasks. No number, name or word of the held-out ones is in the training ones."""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
NAMES = str.split(
    "Alice Bob Carol David Emma Frank Grace Henry Iris Jack Kate Leo Maria Nina Oscar Paul Quinn "
    "Rosa Sam Tina Uma Victor Wendy Yara Zoe Anna Ben Clara Daniel Elena Felix Hugo Julia Karl "
    "Laura Max Nora Omar Peter Ruth Simon Tom Vera Will Ada Alan Bella Diego Eva"
)
WORDS = str.split(
    "apple river stone cloud paper window garden music ocean winter summer letter bridge forest "
    "candle mirror pocket rocket silver ticket travel yellow button camera dinner engine flower "
    "hammer island jacket kitten ladder market number orange pencil rabbit school tiger water"
)


def main() -> None:
    rng = random.Random(0)
    write("train.jsonl", tasks(rng, range(5, 100, 3), NAMES[::3], WORDS[::3], count=400))
    write("held_out.jsonl", tasks(rng, range(6, 100, 3), NAMES[1::3], WORDS[1::3], count=48))
    # Settings were chosen by these; the held-out ones were left alone until the run that is shown.
    write("dev.jsonl", tasks(rng, range(7, 100, 3), NAMES[2::3], WORDS[2::3], count=48))


def tasks(
    rng: random.Random, minutes: range, names: list[str], words: list[str], count: int
) -> list[dict]:
    """Timers and messages in turn, so that the assistant has to tell them apart."""
    made = []
    for i in range(count):
        if i % 2:
            n = rng.choice(minutes)
            made.append({"request": f"Start a timer for {n} minutes.", "wanted": ["set_timer", n]})
        else:
            to, text = rng.choice(names), rng.choice(words)
            request = f"Send {to}: {text}."
            made.append({"request": request, "wanted": ["send_message", to, text]})
    rng.shuffle(made)
    return made


def write(name: str, made: list[dict]) -> None:
    (HERE / name).write_text("".join(json.dumps(task) + "\n" for task in made))


if __name__ == "__main__":
    main()
