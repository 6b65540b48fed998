"""The offline answerer: rules over the data set's attributes, served as an OpenAI-compatible model.

It replaces the large model that would otherwise answer the player's questions. It reads the nouns
and their attributes and needs only the standard library.

    python answerer.py                       # serves until interrupted
    python answerer.py -- agentrl train ...  # serves while the command runs, ends with its code

Two models: ``answerer`` reads a secret word and a question from the last message and replies with a
verdict in JSON; ``search`` lists nouns of the training half that fit a description.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

HERE = Path(__file__).parent
PORT = 8765

# Questions for each attribute. The first match counts, so specific patterns come first.
ATTRIBUTES = {
    "water": r"\b(water|swim|sea|ocean|float)",
    "big": r"\b(bigger|larger|heavier) than a car\b|\b(big|large|huge)\b",
    "small": r"\bin (a|one|your) hand\b|\b(small|tiny)\b",
    "made": r"\b(made|built|manufactured|produced) by\b|\b(man-?made|artificial)\b",
    "metal": r"\bmetal",
    "wood": r"\bwood",
    "wheels": r"\bwheel",
    "engine": r"\b(engine|motor)\b",
    "electric": r"\belectric|\bbatter(y|ies)\b|\bplugged\b",
    "strings": r"\bstring",
    "music": r"\bmusic",
    "sharp": r"\bsharp|\bcut\b",
    "legs": r"\bleg",
    "fur": r"\b(fur|furry|hair|wool)\b",
    "flies": r"\b(fly|flies|flying)\b",
    "worn": r"\b(wear|worn)\b",
    "edible": r"\b(eat|eaten|edible)\b",
    "sweet": r"\bsweet\b",
    "grows": r"\bgrow",
    "soft": r"\bsoft\b",
    "home": r"\b(house|home|indoors|room)\b",
    "moves": r"\bmove",
    "alive": r"\b(alive|living|live)\b",
}
# Where a single word would answer another question than the one asked.
UNREADABLE = re.compile(r"\bthan\b(?! a car\b)|\b(two|three|four|six|eight)\b")
CATEGORIES = {
    "animal": "animal animals",
    "food": "food",
    "vehicle": "vehicle vehicles",
    "tool": "tool tools",
    "furniture": "furniture",
    "place": "place places",
    "clothing": "clothing clothes garment",
    "instrument": "instrument instruments",
}
CATEGORY_OF_WORD = {word: one for one, words in CATEGORIES.items() for word in words.split()}
NAMING = re.compile(
    r"is (?:it|the secret word) (?P<article>an? |the |some )?"
    r"(?:(?:kind|type|sort|piece) of )?(?:an? )?(?:musical )?(?P<word>[a-z]+)"
)


def load_nouns(*splits: str) -> dict[str, dict[str, Any]]:
    """Return the data set's rows by noun; ``splits`` are ``train`` and ``test``."""
    rows: dict[str, dict[str, Any]] = {}
    for split in splits:
        for line in (HERE / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[row["noun"]] = row
    return rows


NOUNS = load_nouns("train", "test")


def verdict(noun: str, target: str, question: str) -> dict[str, Any]:
    """Answer one question.

    Args:
        noun: the secret word.
        target: what the player has to name: the noun itself, or its category.
        question: in English; what the rules cannot read is answered "n/a".

    Raises:
        KeyError: the noun is not in the data set.
    """
    secret = NOUNS[noun]
    asked = re.sub(r"[^a-z\s'-]", "", question.lower()).strip()
    named = NAMING.fullmatch(asked)
    if named:
        word = named["word"]
        meant = CATEGORY_OF_WORD.get(word, word)
        if meant in CATEGORIES:
            holds = secret["category"] == meant
            return _verdict(f"It is {'' if holds else 'not '}{meant}.", holds, meant == target)
        if meant in NOUNS or named["article"]:
            return _verdict(
                f"It is {'' if meant == noun else 'not '}{word}.", meant == noun, meant == target
            )
    if re.search(r"\bnot\b|n't\b", asked):
        return _verdict("A negated question has no clear answer.", None, False)
    if UNREADABLE.search(asked):
        return _verdict("I compare with cars only and do not count.", None, False)
    for attribute, pattern in ATTRIBUTES.items():
        if re.search(pattern, asked):
            holds = attribute in secret["attributes"]
            return _verdict(f"'{attribute}' is {'' if holds else 'not '}true of it.", holds, False)
    return _verdict("I do not understand the question.", None, False)


def _verdict(reason: str, holds: bool | None, correct: bool) -> dict[str, Any]:
    answer = "n/a" if holds is None else "yes" if holds else "no"
    return {"brief_reason": reason, "yes_or_no": answer, "correct": correct}


def search(query: str) -> str:
    """List training nouns that fit every category and attribute of the query."""
    words = query.lower()
    categories = {
        CATEGORY_OF_WORD[w] for w in re.findall(r"[a-z]+", words) if w in CATEGORY_OF_WORD
    }
    wanted = {name for name, pattern in ATTRIBUTES.items() if re.search(pattern, words)}
    found = [
        row["noun"]
        for row in load_nouns("train").values()
        if wanted <= set(row["attributes"]) and (not categories or row["category"] in categories)
    ]
    if not (wanted or categories) or not found:
        return "Nothing found."
    return f"Found: {', '.join(found[:12])}."


SECRET = re.compile(r'secret word is "(?P<noun>[^"]+)".*?\bnaming "(?P<target>[^"]+)"', re.DOTALL)
QUESTION = re.compile(r"Question: ?(?P<question>.*?)(?:\n|$)")


class BadRequest(ValueError):
    """The request cannot be answered; the message says why."""


def reply(request: dict[str, Any]) -> str:
    """Return the model's answer to a chat-completions request."""
    if request.get("stream"):
        raise BadRequest("stream: this server does not stream; ask with stream = false")
    messages = request.get("messages") or [{}]
    prompt = str(messages[-1].get("content", ""))
    if request.get("model") == "search":
        return search(prompt)
    secret, question = SECRET.search(prompt), QUESTION.search(prompt)
    if not secret or not question:
        raise BadRequest(
            "messages: the last one must say 'The secret word is \"x\"', 'naming \"y\"' and, on a "
            "line of its own, 'Question: ...'"
        )
    if secret["noun"] not in NOUNS:
        raise BadRequest(f"messages: {secret['noun']!r} is not in the data set")
    return json.dumps(verdict(secret["noun"], secret["target"], question["question"]))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet

    def do_GET(self) -> None:
        models = [{"id": name, "object": "model"} for name in ("answerer", "search")]
        self._answer(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            request = json.loads(body)
            text = reply(request)
        except ValueError as error:
            self._answer(400, {"error": {"message": str(error), "type": "invalid_request_error"}})
            return
        message = {"role": "assistant", "content": text}
        self._answer(
            200,
            {
                "id": f"chatcmpl-{time.time_ns():x}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request.get("model", "answerer"),
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {
                    "prompt_tokens": len(body) // 4,
                    "completion_tokens": len(text) // 4,
                    "total_tokens": (len(body) + len(text)) // 4,
                },
            },
        )

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    own, command = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description="The offline answerer of 20 Questions.")
    parser.add_argument("--port", type=int, default=PORT)
    server = Server(("127.0.0.1", parser.parse_args(own).port), Handler)
    print(f"answerer at http://127.0.0.1:{server.server_port}/v1", file=sys.stderr)
    if not command:
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        return
    Thread(target=server.serve_forever, daemon=True).start()
    with subprocess.Popen(command) as running:
        # Ctrl-C reaches the command as well, which then takes its time to end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(running.wait())


if __name__ == "__main__":
    main()
