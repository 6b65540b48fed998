"""Remove rules of the library one by one; the tests must notice each removal.

    python scripts/mutations.py [RULE ...]      by default all of scripts/mutations.toml

Each rule names a file, the text that enforces it, the text without it, and the tests to run. A rule
that survives (its tests stay green) is printed, and the exit status is 1. Run it in a clean working
tree; every file is restored.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = Path(__file__).with_suffix(".toml")
PACKAGES = ("agentrl", "proxy", "tracer", "trainer")
# The packages of this checkout, though another one's may be installed.
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / one) for one in PACKAGES)}


def survives(rule: dict[str, str]) -> bool:
    """Remove the rule, run its tests, restore the file; return whether the tests stayed green."""
    file = ROOT / rule["file"]
    text = file.read_text(encoding="utf-8")
    if text.count(rule["old"]) != 1:
        sys.exit(f"{rule['id']}: {rule['file']} must hold this text once:\n{rule['old']}")
    file.write_text(text.replace(rule["old"], rule["new"]), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *rule["tests"].split()],
            cwd=ROOT,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        file.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1):  # neither green nor red: the tests did not run
        sys.exit(f"{rule['id']}: pytest could not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main() -> None:
    rules = tomllib.loads(RULES.read_text(encoding="utf-8"))["rule"]
    chosen = [rule for rule in rules if not sys.argv[1:] or rule["id"] in sys.argv[1:]]
    survivors = []
    for number, rule in enumerate(chosen, 1):
        alive = survives(rule)
        survivors += [rule["id"]] if alive else []
        state = "SURVIVES" if alive else "caught"
        print(f"{number:2}/{len(chosen)} {rule['id']:4} {state:8} {rule['rule']}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} removals were caught")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
