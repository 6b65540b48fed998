"""scripts/mutations.toml must follow the code: ``make mutations`` takes 17 minutes to say so."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = tomllib.loads((ROOT / "scripts/mutations.toml").read_text(encoding="utf-8"))["rule"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["id"])
def test_a_rule_names_text_and_tests_that_exist(rule: dict[str, str]) -> None:
    assert (ROOT / rule["file"]).read_text(encoding="utf-8").count(rule["old"]) == 1
    for test in rule["tests"].removeprefix("-m kills ").split():
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name.partition('[')[0]}(" in text
