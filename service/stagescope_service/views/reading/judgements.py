"""What the doctor last said of each run, made again in the background where it may have changed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from stagescope_service.views.models.runs import Judgement

logger = logging.getLogger(__name__)

_MOST: Final = 10_000


class _Known(NamedTuple):
    key: object
    judgement: Judgement


class Judgements:
    """The judgements of runs; thread-safe. One is made at a time, behind all that is asked for."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._due: set[str] = set()
        self._lock = threading.Lock()
        self._pause = 0.3
        """Seconds before the next one."""
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "api-judgements")

    def close(self) -> None:
        """Drop the judgements that are due, and wait for the one that is being made."""
        with self._lock:
            self._closed.set()
        self._thread.shutdown(cancel_futures=True)

    def of(self, run: str, key: object, judge: Callable[[], Judgement]) -> Judgement | None:
        """Return the last judgement of a run; if it is not current, let another be made.

        Args:
            run: the run.
            key: of the state that it is in: another key makes the judgement old.
            judge: makes it; called in the background.

        Returns:
            None: the first is being made.
        """
        with self._lock:
            known = self._known.get(run)
            is_current = known is not None and known.key == key
            if not is_current and run not in self._due and not self._closed.is_set():
                self._due.add(run)
                self._thread.submit(self._make, run, key, judge)
        if known is None:
            return None
        return known.judgement if is_current else {**known.judgement, "current": False}

    def _make(self, run: str, key: object, judge: Callable[[], Judgement]) -> None:
        # Readers come first: it begins after a while, and takes half of a core at most.
        if self._closed.wait(self._pause):
            return
        began = time.monotonic()
        try:
            judgement = judge()
        except Exception:
            logger.exception("the doctor could not judge run %s", run)
            judgement = Judgement(
                healthy=None, current=True, title=None, sentence=None, since_step=None, where=None
            )
        self._pause = time.monotonic() - began
        with self._lock:
            self._due.discard(run)
            self._known[run] = _Known(key, judgement)
            while len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
