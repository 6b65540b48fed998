"""Replace halves of characters (lone surrogates), as of a text that was cut in an emoji.

Python and JSON hold them, UTF-8 does not.
"""

from __future__ import annotations

import json
from contextlib import suppress


def encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def encodable_json(body: bytes) -> bytes:
    """Replace them in the strings of JSON; what is no JSON stays as it is."""
    if b"\\ud" in body.lower():
        with suppress(ValueError, RecursionError):
            return encodable(json.dumps(json.loads(body), ensure_ascii=False)).encode()
    return body
