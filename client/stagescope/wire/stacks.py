"""The Python stacks of a process, and the file into which its watchdog writes them.

A process whose interpreter lock is held by one call cannot answer. Its watchdog
(`faulthandler.dump_traceback_later`) writes all the same, into a file that whoever runs on that
node can read:

* `{temp}/stagescope-watchdog-{uid}/{pid}-{32 hex digits}.txt`, mode 0600
* its first line is JSON, written anew each time that the watchdog is set: `{"schema", "armed",
  "threads": {ident: name}, "training": [ident], "work": {...}}`
* what follows is faulthandler's: empty unless it went off
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope.wire.errors import Forbidden
from stagescope.wire.schema import SCHEMA, WORK_FIELDS

MOST_THREADS: Final = 256
MOST_FRAMES: Final = 200
"""Frames of one thread; of a deeper stack the innermost are kept."""
MOST_CHARACTERS: Final = 256_000
"""Of all stacks of a process together."""

PROBE: Final = "probe"
WATCHDOG: Final = "watchdog"

_DIRECTORY: Final = re.compile(r"stagescope-watchdog-[A-Za-z0-9_]+\Z")
_FILE: Final = re.compile(r"[0-9]+-[0-9a-f]{32}\.txt\Z")
_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_WENT_OFF: Final = "Timeout ("


def watchdog_directory(temp: str | Path) -> Path:
    """Return this user's directory of watchdog files below `temp`."""
    return Path(temp) / f"stagescope-watchdog-{os.getuid()}"


def watchdog_header(
    *, armed: float, threads: Mapping[int, str], training: Sequence[int], work: Mapping[str, Any]
) -> str:
    """Return the first line of a watchdog's file, with its line end.

    Args:
        armed: Unix time, seconds.
        threads: ident -> name.
        training: idents of the threads that are inside a stage, or were last.
        work: work fields of the stage that was entered last.
    """
    known = {
        "schema": SCHEMA,
        "armed": armed,
        "threads": dict([*threads.items()][:MOST_THREADS]),
        "training": [*training],
        "work": dict(work),
    }
    return json.dumps(known) + "\n"


def read_watchdog(path: str | Path) -> dict[str, Any] | None:
    """Return the fields of a STACKS event as a watchdog's file says them.

    At most `MOST_CHARACTERS` of the file are read. None: there is no such file, or the watchdog
    did not go off since it was set.

    Raises:
        Forbidden: the path is not one that a watchdog writes to.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if not (path.is_absolute() and _DIRECTORY.match(path.parent.name) and _FILE.match(path.name)):
        raise Forbidden(
            f"{str(path)!r:.300} is no watchdog's file",
            expected="/.../stagescope-watchdog-{uid}/{pid}-{32 hex digits}.txt",
        )
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Forbidden(f"{str(path)!r:.300} is no watchdog's file", expected="a regular file")
        text = file.read(MOST_CHARACTERS + 1)
    return parse_watchdog(text.decode("utf-8", "replace"))


def parse_watchdog(text: str) -> dict[str, Any] | None:
    """Return the fields of a STACKS event from the text of a watchdog's file; None as above."""
    first, _, dumped = text.partition("\n")
    if _WENT_OFF not in dumped:
        return None
    header = _header(first)
    names: Mapping[str, Any] = header.get("threads") or {}
    training = header.get("training") or []
    threads: list[dict[str, Any]] = []
    for line in dumped.splitlines():
        if found := _THREAD.match(line):
            ident = int(found[1], 16)
            threads.append(
                {
                    "name": names.get(str(ident)),
                    "ident": ident,
                    "is_training": ident in training,
                    "stack": [],
                }
            )
        elif threads and line.startswith("  "):
            threads[-1]["stack"].append(line)
    for thread in threads:  # faulthandler begins with the innermost frame
        thread["stack"] = "\n".join(reversed(thread["stack"]))
    work: Mapping[str, Any] = header.get("work") or {}
    return {
        **{name: work.get(name) for name in WORK_FIELDS},
        "request_id": f"{WATCHDOG}-{int(float(header.get('armed') or 0.0) * 1000)}",
        "source": WATCHDOG,
        "threads": threads[:MOST_THREADS],
        "truncated": len(text) > MOST_CHARACTERS or len(threads) > MOST_THREADS,
    }


def _header(line: str) -> Mapping[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) and said.get("schema") == SCHEMA else {}
