"""The Python stacks of a process, and the file into which its watchdog writes them.

A process in which one call holds the interpreter lock cannot answer a request. Its watchdog
(`faulthandler.dump_traceback_later`) still writes a file that this user's processes on the node can
read:

* `{temp}/stagescope-watchdog-{uid}/{pid}-{32 hex digits}.txt`, mode 0600
* its first line is JSON, rewritten each time that the watchdog is armed: `{"schema", "armed",
  "threads": {ident: name}, "training": [ident], "work": {...}}`
* the rest is faulthandler's output: empty unless the watchdog fired
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope_wire.errors import Forbidden
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import SCHEMA, WORK_FIELDS

MAX_THREADS: Final = 256
MAX_FRAMES: Final = 200
"""Most frames of one thread; the innermost are kept."""
MAX_CHARACTERS: Final = 256_000
"""Most characters of all stacks of a process."""

PROBE: Final = "probe"
WATCHDOG: Final = "watchdog"

_DIRECTORY: Final = re.compile(r"stagescope-watchdog-[A-Za-z0-9_]+\Z")
_FILE: Final = re.compile(r"[0-9]+-[0-9a-f]{32}\.txt\Z")
_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FIRED: Final = "Timeout ("
"""faulthandler's output begins with it."""


def watchdog_directory(temp: str | Path) -> Path:
    """Return this user's directory of watchdog files below `temp`."""
    return Path(temp) / f"stagescope-watchdog-{os.getuid()}"


def watchdog_header(
    *, armed: float, threads: Mapping[int, str], training: Sequence[int], work: JsonObject
) -> str:
    """Return the first line of a watchdog's file, with its line end.

    Args:
        armed: when the watchdog was armed, Unix time in seconds.
        threads: ident -> name.
        training: idents of the threads that are, or most recently were, inside a stage.
        work: work fields of the stage that was entered last.
    """
    header = {
        "schema": SCHEMA, "armed": armed, "threads": dict([*threads.items()][:MAX_THREADS]),
        "training": [*training], "work": dict(work),
    }  # fmt: skip
    return json.dumps(header) + "\n"


def read_watchdog(path: str | Path) -> dict[str, Json] | None:
    """Return the fields of a STACKS event from a watchdog's file.

    At most `MAX_CHARACTERS` of the file are read. None if there is no such file, or if the
    watchdog has not fired since it was armed, or has not written a thread yet.

    Raises:
        Forbidden: the path names no watchdog's file.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if not (path.is_absolute() and _DIRECTORY.match(path.parent.name) and _FILE.match(path.name)):
        raise Forbidden(
            f"{str(path)!r:.300} is not a watchdog's file",
            expected="/.../stagescope-watchdog-{uid}/{pid}-{32 hex digits}.txt",
        )
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Forbidden(
                f"{str(path)!r:.300} is not a watchdog's file", expected="a regular file"
            )
        text = file.read(MAX_CHARACTERS + 1)
    return parse_watchdog(text.decode("utf-8", "replace"))


def parse_watchdog(text: str) -> dict[str, Json] | None:
    """Return the fields of a STACKS event from the text of a watchdog's file, else None."""
    first, _, dumped = text.partition("\n")
    if _FIRED not in dumped:
        return None
    header = _header(first)
    names: JsonObject = header.get("threads") or {}
    training = header.get("training") or []
    threads: list[dict[str, Json]] = []
    for line in dumped.split("\n"):
        if found := _THREAD.match(line):
            ident = int(found[1], 16)
            threads.append(
                {
                    "name": names.get(str(ident)), "ident": ident, "is_training": ident in training,
                    "stack": [],
                }
            )  # fmt: skip
        elif threads and line.startswith("  "):
            threads[-1]["stack"].append(line)
    if not threads:  # it writes line by line
        return None
    for thread in threads:  # faulthandler writes the innermost frame first
        thread["stack"] = "\n".join(reversed(thread["stack"]))
    work: JsonObject = header.get("work") or {}
    return {
        **{name: work.get(name) for name in WORK_FIELDS},
        "request_id": f"{WATCHDOG}-{int(float(header.get('armed') or 0.0) * 1000)}",
        "source": WATCHDOG,
        "threads": threads[:MAX_THREADS],
        "truncated": len(text) > MAX_CHARACTERS or len(threads) > MAX_THREADS,
    }


def _header(line: str) -> JsonObject:
    try:
        header = json.loads(line)
    except ValueError:
        return {}
    return header if isinstance(header, dict) and header.get("schema") == SCHEMA else {}
