"""Write small tasks with tests: shell commands, shell pipes, and Python functions to fix.

Known and held-out tasks have the same kinds and no word in common. Every task's solution is known
here and is in no task. Usage: python make_tasks.py [--seed 0] [--count 96]
"""

import argparse
import json
import random
from pathlib import Path

NAMES = ["alpha", "basil", "cedar", "delta", "ember", "fern", "glade", "iris", "jade", "coral"]
HELD_OUT_NAMES = ["kelp", "lilac", "maple", "nectar", "olive", "pearl", "quartz", "river"]
ANIMALS = ["ant", "bear", "cat", "deer", "eel", "fox", "goat", "hare"]
HELD_OUT_ANIMALS = ["ibis", "jay", "koala", "lynx", "mole", "newt"]

CHECK = """
def check(*cases):
    passed = 0
    for case in cases:
        try:
            passed += bool(case())
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    print(f"{passed}/{len(cases)}")
"""


def holds(path, text):
    return f"lambda: Path({path!r}).read_text().strip() == {text.strip()!r}"


def shell_tasks(draw, names, animals):
    """Yield kind, files, instruction, checks as Python lambdas, and the solution."""
    a, b = draw.sample(names, 2)
    x, y = draw.sample(animals, 2)
    there = f"lambda: Path('{b}.txt').exists()"
    yield (
        "write", {"README": "Notes.\n"}, f"Write the word {x} into the file {b}.txt.",
        [there, holds(f"{b}.txt", x)], f"echo {x} > {b}.txt",
    )  # fmt: skip
    yield (
        "rename", {f"{a}.txt": f"{x}\n"}, f"Rename the file {a}.txt to {b}.txt.",
        [there, f"lambda: Path('{b}.txt').exists() and not Path('{a}.txt').exists()"],
        f"mv {a}.txt {b}.txt",
    )  # fmt: skip
    yield (
        "copy", {f"{a}.txt": f"{x}\n"}, f"Copy the file {a}.txt to {b}.txt.",
        [there, f"lambda: Path('{b}.txt').exists() and Path('{a}.txt').exists()"],
        f"cp {a}.txt {b}.txt",
    )  # fmt: skip
    yield (
        "append", {f"{a}.txt": f"{x}\n"}, f"Append the word {y} to the file {a}.txt.",
        [f"lambda: {y!r} in Path('{a}.txt').read_text()", holds(f"{a}.txt", f"{x}\n{y}")],
        f"echo {y} >> {a}.txt",
    )  # fmt: skip
    yield (
        "folder", {f"{a}.txt": f"{x}\n"}, f"Create the folder {b} and move {a}.txt into it.",
        [f"lambda: Path({b!r}).is_dir()", f"lambda: Path('{b}/{a}.txt').exists()"],
        f"mkdir {b} && mv {a}.txt {b}/",
    )  # fmt: skip
    yield (
        "delete", {f"{a}.tmp": "", f"{b}.tmp": "", "keep.txt": x},
        "Delete all files that end in .tmp.",
        [f"lambda n={n!r}: not Path(n).exists() and Path('keep.txt').exists()"
         for n in (f"{a}.tmp", f"{b}.tmp")], "rm *.tmp",
    )  # fmt: skip


def pipe_tasks(draw, names, animals):
    """Yield the same for work that reads one file and writes another."""
    a, b = draw.sample(names, 2)
    x, y = draw.sample(animals, 2)
    count = draw.randint(2, 6)
    lines = [x] * count + [y] * draw.randint(1, 4) + ["other"]
    draw.shuffle(lines)
    log = "\n".join(lines) + "\n"
    ordered = "\n".join(sorted(lines)) + "\n"
    there = f"lambda: Path('{b}.txt').exists()"
    yield (
        "count", {f"{a}.log": log},
        f"Write the number of lines of {a}.log that are {x} into {b}.txt.",
        [there, holds(f"{b}.txt", str(count))], f"grep -cx {x} {a}.log > {b}.txt",
    )  # fmt: skip
    yield (
        "sort", {f"{a}.txt": log}, f"Write the sorted lines of {a}.txt into {b}.txt.",
        [there, holds(f"{b}.txt", ordered)], f"LC_ALL=C sort {a}.txt > {b}.txt",
    )  # fmt: skip
    texts = {f"{a}.txt": log, f"{b}.txt": f"one {x}\n"}
    yield (
        "replace", texts, f"Replace {x} by {y}s in all .txt files.",
        [holds(path, text.replace(x, f"{y}s")) for path, text in texts.items()],
        f"sed -i s/{x}/{y}s/g *.txt",
    )  # fmt: skip


# Name of the function, what it must do, the wrong body, the right one, calls with their results.
FUNCTIONS = [
    ("total_to", "return the sum of 1 to n", "return sum(range(n))", "return sum(range(n + 1))",
     ["n"], [("4", 10), ("1", 1), ("10", 55)]),
    ("largest", "return the largest of the numbers", "return min(n)", "return max(n)",
     ["n"], [("[3, 9, 2]", 9), ("[-5, -1]", -1)]),
    ("is_even", "tell whether n is even", "return n % 2 == 1", "return n % 2 == 0",
     ["n"], [("4", True), ("7", False)]),
    ("initials", "return the first letters of the words, in capitals",
     "return ''.join(word[0] for word in text.split())",
     "return ''.join(word[0] for word in text.split()).upper()",
     ["text"], [("'ada lovelace'", "AL"), ("'b c'", "BC")]),
    ("average", "return the mean of the numbers, and 0 of none", "return sum(n) / len(n)",
     "return sum(n) / len(n) if n else 0", ["n"], [("[]", 0), ("[2, 4]", 3)]),
    ("add_once", "append the item to the list if it is not in it, and return the list",
     "items.append(item)\n    return items",
     "if item not in items:\n        items.append(item)\n    return items",
     ["item", "items"], [("1, [1, 2]", [1, 2]), ("3, [1]", [1, 3])]),
    ("factorial", "return the factorial of n", "return n * factorial(n - 1)",
     "return n * factorial(n - 1) if n > 1 else 1", ["n"], [("0", 1), ("5", 120)]),
    ("between", "tell whether low <= n <= high", "return low < n < high",
     "return low <= n <= high", ["n", "low", "high"], [("1, 1, 3", True), ("3, 1, 3", True)]),
]  # fmt: skip


def python_tasks(draw, names, animals):
    """Yield the same for a module with one wrong function among right ones."""
    for name, purpose, wrong, right, parameters, calls in FUNCTIONS:
        module, neighbor, number = draw.choice(names), draw.choice(animals), draw.randint(2, 9)
        head = f'def {name}({", ".join(parameters)}):\n    """{purpose.capitalize()}."""\n    '
        rest = f"\n\n\ndef {neighbor}(n):\n    return n * {number}\n"
        checks = [f"lambda: {module}.{name}({given}) == {result!r}" for given, result in calls]
        yield (
            f"fix-{name}", {f"{module}.py": head + wrong + rest},
            f"The function {name} in {module}.py must {purpose}. Fix it.",
            [f"lambda: {module}.{neighbor}(1) == {number} and ({case[8:]})" for case in checks],
            f"cat > {module}.py <<'END'\n{head}{right}{rest}END",
        )  # fmt: skip


def tasks_with_solutions(make, seed, count, *, held_out=False):
    """Return ``count`` different tasks of all kinds in turn, each with a command that solves it."""
    draw = random.Random(f"{make.__name__} {seed} {held_out}")
    words = (HELD_OUT_NAMES, HELD_OUT_ANIMALS) if held_out else (NAMES, ANIMALS)
    made = {}
    while len(made) < count:
        for kind, files, instruction, checks, solution in make(draw, *words):
            module = next((path[:-3] for path in files if path.endswith(".py")), None)
            head = f"import {module}\n" if module else "from pathlib import Path\n"
            test = f"{head}{CHECK}\ncheck({', '.join(checks)})\n"
            task = {
                "kind": kind,
                "instruction": instruction,
                "repository": files,
                "hidden": {"check_hidden.py": test},
                "test": "python3 check_hidden.py",
                "limits": {
                    "seconds": 120,
                    "test_seconds": 20,
                    "cpu_seconds": 60,
                    "memory_mb": 2048,
                },
            }
            made.setdefault(json.dumps([instruction, files]), (task, solution))
    return list(made.values())[:count]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=96)
    given = parser.parse_args()
    for make in (shell_tasks, pipe_tasks, python_tasks):
        for split, count in (("train", given.count), ("held_out", given.count // 2)):
            found = tasks_with_solutions(make, given.seed, count, held_out=split == "held_out")
            path = Path(__file__).with_name(f"{make.__name__.split('_')[0]}_{split}.jsonl")
            path.write_text("".join(json.dumps(task) + "\n" for task, _ in found))


if __name__ == "__main__":
    main()
