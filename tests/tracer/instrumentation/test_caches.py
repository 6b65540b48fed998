"""No attempt is answered from what a framework cached for another one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

# Two attempts take turns in one process, as `rollouts_per_process` lets them.
_TURNS = """
import os
from agentrl_tracer.tracing import rollout_tracing
os.environ |= {"AGENTRL_ROLLOUT_ID": "r", "AGENTRL_GATEWAY": "http://127.0.0.1:9"}

def attempts():
    for name in ("a", "b", "a"):
        os.environ["AGENTRL_ATTEMPT_ID"] = name
        rollout_tracing()
        yield name
"""

_LANGCHAIN = """
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models.fake_chat_models import FakeListChatModel

set_llm_cache(InMemoryCache())
model = FakeListChatModel(responses=["first", "second", "third"])
print([(name, model.invoke("hello").content) for name in attempts()])
"""

_LITELLM = """
import litellm

litellm.cache = litellm.Cache(type="local")
asked = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}

texts = iter(["first", "second", "third"])
said = []
for name in attempts():
    key = litellm.cache.get_cache_key(**asked)
    found = litellm.cache.get_cache(**asked)
    if found is None:
        found = {"text": next(texts)}
        litellm.cache.add_cache(found, **asked)
    assert litellm.cache.get_cache_key(**asked, preset_cache_key=key) == key
    said.append((name, found["text"]))
print(said)
"""


@pytest.mark.parametrize(
    ("package", "agent"), [("langchain_core", _LANGCHAIN), ("litellm", _LITELLM)]
)
def test_each_attempt_has_answers_of_its_own(package: str, agent: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", _TURNS + agent],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = [("a", "first"), ("b", "second"), ("a", "first")]
    assert done.stdout.strip().splitlines()[-1] == str(expected)
