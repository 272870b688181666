"""Reads stack.json and construct.json: the source line and the parent module of each operator.

Both are optional, and may be truncated or malformed: what they lack is unknown, and `problems` says
why. Only names and stacks up to a limit are held in memory.

The **source** of an operator is the innermost frame whose file does not belong to torch, torch_npu,
mindspore, msprobe or this project's workers: a model's own code, of the user or of a library such
as transformers. If every frame belongs to one of these, it is the innermost frame. Only forward
calls have a stack; a backward call has that of its forward call.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stagescope.wire.errors import NotFound, StagescopeError
from stagescope_service.dumps.msprobe.json_window import JsonValue, JsonWindow, Truncated, open_file
from stagescope_service.dumps.msprobe.operators import forward_name

MAX_NAMES: Final = 250_000
MAX_STACK_TEXT: Final = 4 << 20
"""Characters of all stacks together; a 4-layer Llama with its optimizer has 51 stacks, 100 kB."""
_MAX_VALUE: Final = 32 << 20
"""Characters of one stack with the names that share it: the calls of a loop share one."""

_MAX_DONE: Final = 1 << 20

_FRAME: Final = re.compile(r"File (?P<file>.+?), line (?P<line>\d+), in (?P<function>[^,]+)")
_LIBRARY_CODE: Final = re.compile(
    r"/(?:site|dist)-packages/(?:torch|torch_npu|mindspore|msprobe|stagescope_workers)/"
    r"|/torch/(?:nn|autograd|optim|distributed|utils|_[a-z]+)/"
    r"|/torch/(?:functional|_tensor|_ops)\.py"
    r"|/msprobe/(?:core|pytorch|mindspore)/"
    r"|/stagescope_workers/"
    r"|^<"
)


@dataclasses.dataclass(slots=True)
class CallStacks:
    """The source lines and stacks of operators."""

    ids: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name of a forward call -> id of its stack."""
    sources: dict[str, str | None] = dataclasses.field(default_factory=dict)
    frames: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def source_of_call(self, name: str) -> tuple[str | None, str | None]:
        """Return (source, id of the stack) of a call."""
        stack_id = self.ids.get(name)
        if stack_id is None:
            stack_id = self.ids.get(forward_name(name))
        return (None, None) if stack_id is None else (self.sources.get(stack_id), stack_id)


def read_stacks(path: Path) -> CallStacks:
    """Read stack.json: `{id: [[names...], [frames...]]}`."""
    stacks = CallStacks()
    kept = 0
    for stack_id, value in _entries(path, stacks.problems):
        names, frames = _stack(value)
        if len(stacks.ids) + len(names) > MAX_NAMES:
            stacks.problems.append(f"{path.name} names over {MAX_NAMES} calls: the rest is left")
            break
        stacks.ids.update(dict.fromkeys(names, stack_id))
        stacks.sources[stack_id] = source_of(frames)
        kept += sum(map(len, frames))
        if kept <= MAX_STACK_TEXT:
            stacks.frames[stack_id] = frames
    if kept > MAX_STACK_TEXT:
        stacks.problems.append(f"{path.name} has over {MAX_STACK_TEXT} characters of stacks")
    return stacks


def read_parents(path: Path) -> tuple[dict[str, str], list[str]]:
    """Read construct.json, `{call: call of the module around it, or null}`, and its problems."""
    parents: dict[str, str] = {}
    problems: list[str] = []
    for name, value in _entries(path, problems):
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str):
            parents[name] = value
        if len(parents) > MAX_NAMES:
            problems.append(f"{path.name} names over {MAX_NAMES} calls: the rest is left")
            break
    return parents, problems


def read_done(directory: Path) -> dict[str, JsonValue] | None:
    """Return what a capture wrote in DONE.json; None without one, {} if it is damaged."""
    try:
        with open_file(directory / "DONE.json") as file:
            content = json.loads(file.read(_MAX_DONE))
    except NotFound:
        return None
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def source_of(frames: list[str]) -> str | None:
    """Return `file:line in function` of the source frame; see the module's docstring."""
    found = [match for match in map(_FRAME.match, frames) if match is not None]
    own = [match for match in found if not _LIBRARY_CODE.search(match["file"])]
    for match in (*own, *found):
        return f"{match['file']}:{match['line']} in {match['function'].strip()}"[:1000]
    return None


def _stack(value: JsonValue) -> tuple[list[str], list[str]]:
    """Return (names, frames) of an entry; empty lists if it is malformed."""
    if not isinstance(value, list) or len(value) != 2:
        return [], []
    names, frames = (
        [text for text in part if isinstance(text, str)] if isinstance(part, list) else []
        for part in value
    )
    return names, frames


def _entries(path: Path, problems: list[str]) -> Iterator[tuple[str, JsonValue]]:
    try:
        with open_file(path) as file:
            window = JsonWindow(file, path.name, most_value=_MAX_VALUE)
            try:
                yield from window.entries()
            except Truncated:
                problems.append(f"{path.name} is cut off at byte {window.bytes_read}")
    except NotFound:
        problems.append(f"{path.name} is not there")
    except StagescopeError as error:
        problems.append(str(error)[:500])
