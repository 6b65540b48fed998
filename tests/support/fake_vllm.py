"""A server that says what vLLM says about adapters and health, as a test tells it to."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

CHOICE = {
    "index": 0,
    "token_ids": [5],
    "logprobs": {
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.0}],
    },
    "finish_reason": None,
}


class Server(ThreadingHTTPServer):
    """Says about adapters and health what vLLM says. Of answers it gives the first token."""

    daemon_threads = True

    def __init__(self) -> None:
        self.loras: dict[str, str] = {}  # path by name
        self.well = True
        self.silent = False  # about health: connected, and no answer
        self.lists = True
        self.refusal: tuple[int, str] | None = None  # of loads
        self.wants_files = False  # of adapters, where it sees them
        self.looks = self.loads = 0
        self.updating: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by LoRA
        self.under_way = threading.Semaphore(0)  # an answer more
        self.released = threading.Event()  # what it left without an answer ends
        self.while_loading: Callable[[], Any] = lambda: None
        self.posted: list[tuple[str, str | None]] = []  # paths, and the engines that were named
        self.answers: dict[str, tuple[int, Any]] = {}  # other than vLLM's, by path
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        server = self.server
        if self.path in server.answers:
            self._answer(*server.answers[self.path])
        elif self.path == "/health":
            server.looks += 1
            if server.silent:
                server.released.wait()
            self._answer(200 if server.well else 503, {})
        elif self.path == "/v1/models":
            names = ["base", *(server.loras if server.lists else ())]
            self._answer(200, {"data": [{"id": name, "max_model_len": 64} for name in names]})
        else:
            self._answer(200, {"paths": {"/v1/load_lora_adapter": {}}})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "{}")
        server.posted.append((self.path, self.headers["x-data-parallel-rank"]))
        if self.path in server.answers:
            self._answer(*server.answers[self.path])
        elif self.path in ("/sleep?level=1", "/wake_up"):
            self._answer(200, {})
        elif self.path == "/v1/load_lora_adapter":
            server.loads += 1
            refusal = server.refusal
            if server.wants_files and refusal is None:
                adapter = Path(body["lora_path"])
                try:
                    json.loads((adapter / "adapter_config.json").read_text())
                    if (tensors := adapter / "adapter_model.safetensors").exists():
                        safe_open(tensors, "numpy").__enter__()
                except FileNotFoundError:
                    refusal = 404, "Loading lora policy failed: No adapter found for <path>"
                except (ValueError, SafetensorError) as error:
                    refusal = 500, str(error)
            if refusal is not None:
                status, message = refusal
                self._answer(status, {"error": {"message": message}})
                return
            hook, server.while_loading = server.while_loading, lambda: None
            with server.updating[body["lora_name"]]:
                hook()
                server.loras[body["lora_name"]] = body["lora_path"]
            self._answer(200, {})
        elif self.path == "/v1/unload_lora_adapter":
            with server.updating[body["lora_name"]]:
                had = server.loras.pop(body["lora_name"], None)
            self._answer(200 if had else 404, {})
        elif body["model"] not in ("base", *server.loras):
            self._answer(404, {"error": {"message": "The model does not exist."}})
        elif body["max_tokens"] > 2:  # an answer, not a probe
            if body.get("stream"):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f"data: {json.dumps({'choices': [CHOICE]})}\n\n".encode())
            server.under_way.release()
            server.released.wait()
        else:
            self._answer(200, {"choices": [CHOICE]})

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
