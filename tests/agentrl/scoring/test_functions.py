"""How reward functions are named and loaded, and what is said of those that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from settings import nested

from agentrl.config.commands import EvalConfig, TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load
from agentrl.scoring.functions import RewardFunction, load_functions

_FILE = """
from agentrl.rewards import exact, group_reward

def plain(trace): return 1.0
async def waits(trace): return 1.0
@group_reward
def compares(traces): return [1.0 for _ in traces]
class Judge:
    compares_group = True
    def __init__(self): self.asked = 0
    async def __call__(self, traces): return [0.0 for _ in traces]
judge = Judge()
class Weighted:
    def __init__(self):
        from agentrl.rewards import weighted
        weighted(x=(1.0, judge))
class Broken:
    def __init__(self, model): ...
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(_FILE)
    return path


def _load(*entries: str) -> list[RewardFunction]:
    return load_functions(entries)


def test_functions_objects_and_classes_are_loaded_by_their_kind(file: Path) -> None:
    names = ("plain", "waits", "compares", "judge", "Judge")
    found = _load(*(f"{file}:{name}" for name in names), "agentrl.rewards:exact")
    kinds = [(one.name, one.compares_group) for one in found]
    assert kinds == [
        ("plain", False), ("waits", False), ("compares", True), ("judge", True), ("Judge", True),
        ("exact", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("missing.py:f", "there is no file"),
        ("FILE:absent", "defines no 'absent'"),
        ("FILE:number", "is no function but 3"),
        ("FILE:Broken", "cannot be made: TypeError"),
        ("FILE:Weighted", "weighted: x compares groups"),
        ("ls", "it is a command"),
        ("", "it is empty"),
    ],
)
def test_what_names_no_function_is_refused_with_the_fix(file: Path, entry: str, said: str) -> None:
    with pytest.raises(ConfigError, match="rewards: ") as refused:
        _load(entry.replace("FILE", str(file)))
    assert said in str(refused.value)


def test_a_module_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    path = tmp_path / "fails_at_import.py"
    path.write_text("score = 1 / 0")
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError"):
        _load(f"{path}:score")


def test_two_functions_of_one_name_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="two functions are named 'plain'"):
        _load(f"{file}:plain", f"{file}:plain")


def test_two_judges_of_one_name_are_refused(tmp_path: Path) -> None:
    """Their costs, budgets and notes are by it."""
    file = tmp_path / "judges.py"
    file.write_text(
        "from agentrl.judge import Panel, Rubric\n"
        "helps, safe = Rubric('judge', {'it helps': 1}), Rubric('judge', {'it is safe': 1})\n"
        "both = Panel(safe, Rubric('judge', {'it is short': 1}, name='short'))\n"
    )
    assert len(_load(f"{file}:safe", f"{file}:both")) == 2  # which asks the same judge
    for other in ("safe", "both"):
        with pytest.raises(ConfigError, match=r"two judges are named 'rubric_judge'.* name="):
            _load(f"{file}:helps", f"{file}:{other}")


def test_the_flag_is_given_several_times_or_with_commas() -> None:
    tokens = ["x:y", "--tasks", "t.jsonl", "--rewards"]
    several = load(EvalConfig, [*tokens, "a:b", "--rewards", "c.py:d"])
    assert several.rewards == load(EvalConfig, [*tokens, "a:b,c.py:d"]).rewards == ["a:b", "c.py:d"]
    assert load(TrainConfig, [*tokens, "model:rm"]).rewards == ["model:rm"]


def test_a_policy_for_missing_rewards_does_not_go_with_computed_ones() -> None:
    settings = nested(agent="x:y", tasks="t.jsonl", rewards=["a:b"], on_missing_reward=-1)
    with pytest.raises(ValueError, match=r"on_missing_reward: -1.* acts when the attempt ends"):
        TrainConfig(**settings)
