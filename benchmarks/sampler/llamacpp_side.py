"""llama.cpp's side of ``run.py``: its own server with continuous batching, over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.sampler.workload import Workload, side_options, time_passes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(port: int, path: str, body: dict | None) -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    try:
        data = None if body is None else json.dumps(body)
        headers = {"content-type": "application/json"}
        connection.request("GET" if body is None else "POST", path, data, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"{path}: status {answer.status}: {answer.read(300)!r}")
        return json.loads(answer.read())
    finally:
        connection.close()


def complete(port: int, prompt: list[int], length: int) -> int:
    body = {
        "prompt": prompt, "n_predict": length, "ignore_eos": True, "cache_prompt": False,
        "temperature": 1.0, "samplers": ["temperature"], "seed": length,
    }  # fmt: skip
    return post(port, "/completion", body)["tokens_predicted"]


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    while server.poll() is None:
        try:
            post(port, "/health", None)
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"llama-server ended with {server.returncode}")


def main() -> None:
    parser = side_options(__doc__)
    parser.add_argument("--server", type=Path, required=True, help="llama-server")
    parser.add_argument("--gguf", required=True, help="in the folder")
    parser.add_argument("--lora", help="adapter as GGUF, in the folder")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--cache-type", default="f16", help="of keys and values")
    options = parser.parse_args()
    port, threads = free_port(), str(options.threads)
    command = [
        str(options.server), "--model", str(options.folder / options.gguf), "--port", str(port),
        "--threads", threads, "--threads-batch", threads, "--parallel", str(options.slots),
        "--cont-batching", "--ctx-size", str(options.slots * 1024), "--cache-ram", "0",
        "--cache-type-k", options.cache_type, "--cache-type-v", options.cache_type,
    ]  # fmt: skip
    if options.lora:
        command += ["--lora", str(options.folder / options.lora)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(server, port)
        with ThreadPoolExecutor(options.requests) as clients:

            def run(asked: Workload) -> list[int]:
                pairs = zip(asked.prompts, asked.lengths, strict=True)
                return list(clients.map(lambda pair: complete(port, *pair), pairs))

            time_passes(run, options)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
