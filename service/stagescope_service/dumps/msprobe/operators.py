"""msprobe's records as rows (one per operator call, direction and argument), and their names.

A record holds sections (`input_args`, `output`, ...) of lists and dicts. Its leaves are null, or
dicts whose `type` is a text (an argument may itself be named `type` or `dtype`). A leaf's section
and its path inside it identify the leaf: `1.hidden_states`. A call without leaves has one row
without a section, so that it stays visible.

Max and Min show NaN and infinities in a tensor. The Norm also shows NaN, because some devices leave
NaN out of extremes. An infinite Norm shows nothing, because it overflows for finite float16 values.
-FLT_MAX of a mask is finite. A number may be a text (`"nan"`, `"inf"`), as some versions of msprobe
write it. Null is unknown.

Names of records:

* APIs (L1, mix): `{Functional|Torch|Tensor|NPU|Distributed|...}.{api}.{call}.{forward|backward}`
* modules (L0, mix): `Module.{path}.{Class}.{forward|backward}.{call}`,
  `Module.{path}.{Class}.parameters_grad[.{call}]` (older ones have no counter)
* debug: `{name}.{call}.debug`, with the gradient as `{name}_grad.{call}.debug`

stack.json and construct.json name the source line and the parent module of each operator. Both are
optional, and may be truncated or malformed: what they lack is unknown, and `problems` says why.
Only names and stacks up to a limit are held in memory. The source of an operator is the innermost
frame in a model's own code, of the user or of a library such as transformers. Files of torch,
torch_npu, mindspore, msprobe and this project's workers do not count, unless every frame is in
them: then the innermost frame is the source. Only forward calls have a stack. A backward call
inherits its forward call's stack.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stagescope_service.dumps.msprobe.json_window import JsonValue, JsonWindow, Truncated, open_file
from stagescope_wire.errors import InvalidInput, NotFound, StagescopeError

_MODULE: Final = re.compile(
    r"(?P<kind>Module|Cell)\.(?:(?P<operator>.+)\.)?(?P<module_class>[^.]+)"
    r"\.(?:(?P<direction>forward|backward)\.(?P<call>\d{1,9})"
    r"|(?P<gradient>parameters_grad)(?:\.(?P<update>\d{1,9}))?)\Z"
)
_API: Final = re.compile(
    r"(?P<kind>[^.]+)\.(?P<operator>.+)\.(?P<call>\d{1,9})\.(?P<direction>forward|backward)\Z"
)
_DEBUG: Final = re.compile(r"(?P<operator>.+)\.(?P<call>\d{1,9})\.(?P<direction>debug)\Z")


class OperatorName(NamedTuple):
    """The fields of a record's name; None where the name lacks one."""

    kind: str | None
    operator: str
    module_class: str | None
    call: int | None
    direction: str | None


def parse_name(name: str) -> OperatorName:
    """Parse a name; a name of an unknown form is an operator without a kind."""
    for pattern, kind in ((_MODULE, None), (_API, None), (_DEBUG, "Debug")):
        found = pattern.match(name)
        if found is not None:
            fields = found.groupdict()
            call = fields["call"] or fields.get("update")
            return OperatorName(
                fields.get("kind") or kind,
                fields["operator"] or "",
                fields.get("module_class"),
                None if call is None else int(call),
                fields["direction"] or fields.get("gradient"),
            )
    return OperatorName(None, name, None, None, None)


def forward_name(name: str) -> str:
    """Return the name of the forward call that a backward call belongs to, else `name`."""
    if name.endswith(".backward"):
        return name.removesuffix(".backward") + ".forward"
    return re.sub(r"\.backward(\.\d{1,9})\Z", r".forward\1", name)


MAX_DEPTH: Final = 32
MAX_TEXT: Final = 1000
"""Characters of a text in a row; longer ones are cut."""

_INT64: Final = 1 << 63
_ROUNDED: Final = re.compile(r"b?float|complex|double|half|hifloat")
"""Dtypes that have NaN and infinities."""
_GRADIENT: Final = re.compile(r"_grad\.\d+\.debug\Z")


class Leaf(NamedTuple):
    """One argument, result, parameter or gradient of a call; unknown fields are None."""

    section: str | None = None
    path: str | None = None
    """The column `index`; tuples have a method of that name."""
    type: str | None = None
    dtype: str | None = None
    shape: list[int] | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    norm: float | None = None
    non_finite: str | None = None
    requires_grad: bool | None = None
    checksum: str | None = None
    value: str | None = None
    placements: str | None = None
    data_name: str | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the recorded numbers show whether the tensor is finite."""
        return self.non_finite is not None or (self.min is not None and self.max is not None)

    @property
    def is_unmeasured(self) -> bool:
        """Whether it is a tensor that may hold NaN, but has no number that shows it."""
        if self.is_measured or self.dtype is None or self.shape is None or 0 in self.shape:
            return False
        return _ROUNDED.match(self.dtype.lower()) is not None


def leaves(name: str, direction: str | None, record: JsonValue) -> Iterator[Leaf]:
    """Yield the leaves of a record in file order.

    Args:
        name: of the record, for errors.
        direction: the direction in the name.
        record: as read from JSON.

    Raises:
        InvalidInput: not of msprobe's form, or nested deeper than `MAX_DEPTH`.
    """
    if direction == "debug":
        # A record of debug.json is the saved value itself.
        sections: dict[str, JsonValue] = {"grad" if _GRADIENT.search(name) else "output": record}
    elif not isinstance(record, dict):
        raise InvalidInput(
            f"record {name!r:.200} is a {type(record).__name__}", expected="an object"
        )
    elif direction == "parameters_grad":
        sections = {"grad": {key: _single(value) for key, value in record.items()}}
    else:
        sections = record
    found = False
    for section, content in sections.items():
        for path, leaf in _walk(content, (), name):
            found = True
            yield _leaf(_text(section), _text(".".join(path)), leaf)
    if not found:
        yield Leaf()


def non_finite_kind(low: float | None, high: float | None, norm: float | None = None) -> str | None:
    """Return 'nan', '+inf', '-inf', 'inf' (both signs), or None where all is finite or unknown.

    Args:
        low, high: Min and Max. With a NaN in the tensor both are NaN, also beside infinities.
        norm: NaN only with a NaN in the tensor.
    """
    values = [value for value in (low, high) if value is not None]
    if any(value is not None and math.isnan(value) for value in (low, high, norm)):
        return "nan"
    if all(map(math.isfinite, values)):
        return None
    minus, plus = -math.inf in values, math.inf in values
    if minus and plus:
        return "inf"
    return "-inf" if minus else "+inf"


def _walk(
    content: JsonValue, path: tuple[str, ...], name: str
) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    if len(path) > MAX_DEPTH:
        raise InvalidInput(f"record {name!r:.200} is nested over {MAX_DEPTH} deep")
    if isinstance(content, list):
        for number, item in enumerate(content):
            yield from _walk(item, (*path, str(number)), name)
    elif isinstance(content, dict) and not isinstance(content.get("type"), str):
        for key, item in content.items():
            yield from _walk(item, (*path, key), name)
    else:
        yield path, content


def _single(value: JsonValue) -> JsonValue:
    """Return the only item of a list: a parameter's gradient is in its own list."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _leaf(section: str, index: str, leaf: JsonValue) -> Leaf:
    if leaf is None:
        return Leaf(section, index)
    if not isinstance(leaf, dict):
        return Leaf(section, index, type(leaf).__name__, value=_value_text(leaf))
    kind = _text(str(leaf["type"]))
    dtype, shape = leaf.get("dtype"), leaf.get("shape")
    if not isinstance(dtype, str) or not isinstance(shape, list):
        fields: JsonValue = {key: value for key, value in leaf.items() if key != "type"}
        return Leaf(section, index, kind, value=_value_text(leaf.get("value", fields)))
    low, high, norm = (_number(leaf.get(name)) for name in ("Min", "Max", "Norm"))
    requires_grad, checksum = leaf.get("requires_grad"), leaf.get("md5")
    placements, data_name = leaf.get("placements"), leaf.get("data_name")
    return Leaf(
        section,
        index,
        kind,
        _text(dtype).removeprefix("torch."),
        _shape(shape),
        low,
        high,
        _number(leaf.get("Mean")),
        norm,
        non_finite_kind(low, high, norm),
        requires_grad if isinstance(requires_grad, bool) else None,
        None if checksum is None else _value_text(checksum),
        placements=_value_text(placements) if placements else None,
        data_name=_text(data_name) if isinstance(data_name, str) else None,
    )


def _number(value: JsonValue) -> float | None:
    if not isinstance(value, int | float | str):  # a bool is 0 or 1
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):
        return None


def _shape(shape: list[JsonValue]) -> list[int] | None:
    sizes = [size for size in shape if isinstance(size, int) and 0 <= size < _INT64]
    return sizes if len(sizes) == len(shape) <= MAX_DEPTH else None


def _value_text(value: JsonValue) -> str:
    if isinstance(value, str):
        return _text(value)
    try:
        return json.dumps(value)[:MAX_TEXT]
    except RecursionError as error:
        raise InvalidInput("a value is nested too deep") from error


def clean_text(text: str | None) -> str | None:
    """Return `text` in a form that a column can hold."""
    return None if text is None else _text(text)


def _text(text: str) -> str:
    """Truncate `text`, and replace what UTF-8 cannot encode (half a surrogate pair)."""
    text = text[:MAX_TEXT]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


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
    """Return the content of a capture's DONE.json; None without a file, {} if it is damaged."""
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
