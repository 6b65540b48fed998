"""Keep what a process prints within bounds: its beginning and its end."""

from __future__ import annotations

import os
import threading

_HALF = 1 << 20  # bytes
_PATIENCE_S = 5.0


class Printed:
    """A pipe whose beginning and end are kept, each of a MiB.

    Pass ``pipe`` to a process, ``close`` it, and read ``text`` when all that wrote to it has ended.
    """

    def __init__(self) -> None:
        self._source, self.pipe = os.pipe()
        self._begin, self._end, self._length = bytearray(), bytearray(), 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Close this process's writing end."""
        os.close(self.pipe)

    def text(self) -> str:
        self._reader.join(_PATIENCE_S)  # what escaped may still hold the pipe
        cut = self._length - len(self._begin) - len(self._end)
        between = f"\n... {cut} bytes ...\n".encode() if cut else b""
        return (self._begin + between + self._end).decode(errors="replace")

    def _read(self) -> None:
        with os.fdopen(self._source, "rb", buffering=0) as source:
            while data := source.read(65536):
                self._length += len(data)
                room = _HALF - len(self._begin)
                self._begin += data[:room]
                self._end += data[room:] if room > 0 else data
                del self._end[:-_HALF]
