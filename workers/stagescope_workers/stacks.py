"""The Python stacks of every thread of this process, taken by the background thread.

A collective that waits lets the interpreter go, so this works while the training thread is blocked
in one; see `watchdog` for a call that does not.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

from stagescope.stacks import MOST_CHARACTERS, MOST_FRAMES, MOST_THREADS, PROBE


def take_stacks(
    request_id: str, *, training: Collection[int], work: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a STACKS event about this process, now.

    Args:
        request_id: of the request that it answers.
        training: idents of the training threads; their stacks come first.
        work: work fields of the stage that they are in.
    """
    frames = sys._current_frames()
    names = thread_names()
    order = sorted(frames, key=lambda ident: (ident not in training, names.get(ident) or ""))
    threads: list[dict[str, Any]] = []
    left, truncated = MOST_CHARACTERS, len(order) > MOST_THREADS
    for ident in order[:MOST_THREADS]:
        stack = _text(frames[ident])
        if len(stack) > left:
            stack, truncated = stack[len(stack) - left :], True
        left -= len(stack)
        threads.append(
            {
                "name": names.get(ident),
                "ident": ident,
                "is_training": ident in training,
                "stack": stack,
            }
        )
    return {
        **work,
        "request_id": request_id,
        "source": PROBE,
        "threads": threads,
        "truncated": truncated,
    }


def thread_names() -> dict[int, str]:
    """Return ident -> name of the threads that Python started or met."""
    return {each.ident: each.name for each in threading.enumerate() if each.ident is not None}


def _text(innermost: FrameType) -> str:
    """Return a stack as text, the innermost frame last."""
    kept: list[tuple[FrameType, int]] = []
    for frame, line in traceback.walk_stack(innermost):
        if len(kept) == MOST_FRAMES:
            break
        kept.append((frame, line))
    summary = traceback.StackSummary.extract(iter(reversed(kept)))
    return "".join(summary.format()).rstrip("\n")
