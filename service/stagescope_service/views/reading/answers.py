"""Answers about a whole run, kept while nothing changes that they are made from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

Key = tuple[str, ...]
_BYTES: Final = 32 << 20


class Answers:
    """The answers that were asked for last; thread-safe. One that several ask for is made once."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, bytes] = OrderedDict()
        self._making: dict[Key, threading.Lock] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, key: Key, make: Callable[[], bytes]) -> bytes:
        """Return the answer of a key; `make` makes it where it is not kept."""
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        try:
            with making:
                with self._lock:
                    if key in self._kept:
                        self._kept.move_to_end(key)
                        return self._kept[key]
                answer = make()
                with self._lock:
                    self._keep(key, answer)
                return answer
        finally:
            with self._lock:
                self._making.pop(key, None)

    def _keep(self, key: Key, answer: bytes) -> None:
        self._kept[key] = answer
        self._bytes += len(answer)
        while self._bytes > _BYTES:
            _, old = self._kept.popitem(last=False)
            self._bytes -= len(old)
