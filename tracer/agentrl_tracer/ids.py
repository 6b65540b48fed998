"""Ids that sort by when they were made."""

from __future__ import annotations

import secrets
import time


def new_id(prefix: str = "") -> str:
    """24 hexadecimal digits: nanoseconds since 1970, then 32 random bits (like RFC 9562's UUIDv7).

    So rows of one moment lie side by side in the store's indexes, and a commit writes few pages.
    With random ids each row dirties a page of its own in every index: 80 us a call instead of 35,
    and more the larger the store.
    """
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(4)}"
