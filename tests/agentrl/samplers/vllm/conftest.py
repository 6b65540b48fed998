from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fake_vllm import Server


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()
