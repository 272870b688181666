"""The CPU priority of the service's processes.

Ray starts every worker, and thereby every actor, at niceness 15 (`RAY_worker_niceness`). Beside a
busy program of niceness 0 such a process gets a thirtieth of a core.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

ORDINARY: Final = 0
"""The ordinary niceness of a program."""
_THREADS: Final = Path("/proc/self/task")


def take_ordinary_priority() -> bool:
    """Give all threads of this process the ordinary priority; return whether that is allowed.

    Only root, or a user with CAP_SYS_NICE, may lower the niceness. New threads inherit it.
    """
    try:
        # Linux has a niceness for each thread.
        for thread in _THREADS.iterdir():
            if os.getpriority(os.PRIO_PROCESS, int(thread.name)) > ORDINARY:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), ORDINARY)
    except OSError as error:
        logger.info("this process stays at the niceness that Ray gave it: %s", error)
        return False
    return True


def be_nice(niceness: int) -> None:
    """Make this thread at least this nice; a nicer thread stays as it is."""
    if os.getpriority(os.PRIO_PROCESS, 0) < niceness:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
