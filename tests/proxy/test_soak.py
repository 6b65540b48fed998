"""Many rollouts streaming at once, briefly: benchmarks/gateway/soak.py runs it for a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks/gateway/soak.py"


def test_soak(tmp_path: Path, monkeypatch: Any) -> None:
    # The spawned gateway finds the script by the name it is pickled under.
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import soak  # type: ignore[import-not-found]

    outcome = soak.soak(tmp_path, rollouts=64, seconds=5.0)
    # Memory settles later than this; the long run says whether it stays flat.
    assert outcome.problems(may_grow_mb=60.0) == []
    assert outcome.answered >= 64
    assert outcome.tokens_told == outcome.answered * soak.TOKENS
    assert outcome.continued > outcome.answered / 3
    assert set(outcome.branched) == {"first_call", "new_conversation"}
