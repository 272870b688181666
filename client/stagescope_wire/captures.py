"""Capture requests: their fields, their validation, and which stages they match.

A capture is a plain dict, so that it is sent and stored unchanged. Only `validate_capture` defines
its content. Workers, service and client share this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from stagescope_wire.errors import Forbidden, InvalidPlan
from stagescope_wire.names import requested_run
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.plan import (
    Baseline,
    CaptureLimits,
    CaptureRanks,
    CaptureScope,
    CaptureSpec,
    CaptureSteps,
)
from stagescope_wire.schema import STEP_BOUND

CAPTURE_FIELDS: Final[Mapping[str, str]] = {
    "run": "a run's name, or null: the run whose training stage began last. If no run has "
    "reported yet, null and steps by number mean every run",
    "stages": "a list of stage names, or 'all'",
    "roles": "a list of roles, or null for every role",
    "ranks": "a list of ranks from 0, a text like '0,4-7', 'worst(k)', or 'all'",
    "steps": "a list of steps, a text like '5,8-10', 'next', {'next': k}, 'all', or {'every': n, "
    "'start': s, 'count': c}. Without a start, it begins at the step that the ranks agree on",
    "config": "the content of msprobe's config.json, or null to keep tensors only",
    "config_path": "the path of an msprobe config.json that the ranks can read, or null",
    "bench": "{'capture_id': id, 'step': n}: an earlier capture with summary_mode 'md5'. The "
    "new capture has task 'tensor': msprobe writes only the tensors of operators whose output "
    "differs for equal inputs",
    "data_dir": "where the dumps go, or null for the service's data_dir",
    "keep": "names of payload tensors to keep as safetensors",
    "parameters": "patterns of parameter names, such as '*.q_proj.weight', to keep each rank's "
    "shards of at the stage's end",
    "gradients": "patterns of parameter names to keep the gradients of, each rank's shards",
    "limits": "{'bytes': most bytes a dump may take, 'seconds': most time, 'reserve_bytes': kept "
    "free on the disk, 'tokens': tokens in the stage, for the estimate}, or null",
    "force": "true: start although the estimate does not fit on the disk, or although the name of "
    "the run or of a stage looks misspelt, or although its steps closed in an ended attempt",
    "strict": "whether a failure is raised in the training process",
    "timeout": "seconds that every requested rank has to acknowledge, 60 by default",
    "late": "what to do about ranks that do not: 'wait', 'go_on' without them, or 'give_up'",
    "again": "how often a step that some rank missed is agreed again, 0 by default",
}
SHORTHANDS: Final[Mapping[str, str]] = {
    "task": "msprobe's task, 'statistics' by default",
    "level": "msprobe's level, 'L1' by default",
    "scope": "msprobe's scope: two names; it collects what runs between them",
    "list": "msprobe's list: the names that it collects",
    "data_mode": "msprobe's data_mode: 'all', or some of 'forward', 'backward', 'input', 'output'",
}
"""Fields for the most common requests; stagescope builds a config from them."""

_CONTENT_FIELDS: Final = ("config", "config_path", "keep", "parameters", "gradients", *SHORTHANDS)
"""A request without any of these captures msprobe's statistics."""

LATE: Final = ("wait", "go_on", "give_up")
_WORST: Final = re.compile(r"worst\((\d{1,6})\)")
_RANGE: Final = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?")
_MAX_NUMBERS: Final = 100_000
MSPROBE_TASKS: Final = (
    "statistics", "tensor", "structure", "acc_check", "diff_check", "nan_check",
)  # fmt: skip
MSPROBE_LEVELS: Final = ("L0", "L1", "L2", "mix", "debug")


def validate_capture(spec: JsonObject, *, allowed_roots: Iterable[str]) -> CaptureSpec:
    """Return `spec` with every field present and checked.

    Raises:
        InvalidPlan: an unknown field, or a value that cannot be carried out.
        Forbidden: a path outside `allowed_roots`.
    """
    if not isinstance(spec, Mapping):
        raise InvalidPlan(f"a capture is {spec!r:.200}", expected=f"fields {list(CAPTURE_FIELDS)}")
    check_fields("a capture", spec, {**CAPTURE_FIELDS, **SHORTHANDS})
    if spec.keys().isdisjoint(_CONTENT_FIELDS):
        spec = {**spec, "task": "statistics"}
    spec = {name: value for name, value in spec.items() if value is not None}
    roots = list(allowed_roots)
    capture: CaptureSpec = {
        "run": requested_run(spec["run"]) if "run" in spec else None,
        "stages": _names(spec, "stages", required=True),
        "roles": _names(spec, "roles", required=False),
        "ranks": read_ranks(spec.get("ranks", "all")),
        "steps": read_steps(spec.get("steps")),
        "config": _config(_expand_shorthands(spec)),
        "config_path": _path(spec.get("config_path"), "config_path", roots),
        "bench": _read_baseline(spec.get("bench")),
        "data_dir": _path(spec.get("data_dir"), "data_dir", roots),
        "keep": _names(spec, "keep", required=False) or [],
        "parameters": _names(spec, "parameters", required=False) or [],
        "gradients": _names(spec, "gradients", required=False) or [],
        "limits": _limits(spec.get("limits", {})),
        "force": _flag(spec, "force"),
        "strict": _flag(spec, "strict"),
        "timeout": _timeout(spec.get("timeout", 60.0)),
        "late": _late(spec.get("late", LATE[0])),
        "again": _again(spec.get("again", 0)),
    }
    if capture["config"] is not None and capture["config_path"] is not None:
        raise InvalidPlan(
            "a capture has both config and config_path", expected="one of them, or none"
        )
    for field, path in _paths_in(capture["config"] or {}):
        _path(path, f"config.{field}", roots)
    _check_baseline(capture)
    if not needs_ranks(capture) and not capture["keep"]:
        raise InvalidPlan(
            "a capture requests nothing",
            expected="config or config_path for msprobe, names of tensors in keep, or patterns in "
            "parameters or gradients",
        )
    return capture


def check_fields(what: str, spec: JsonObject, fields: Mapping[str, str]) -> None:
    """Check that a request has no field besides `fields`, each with what it may hold.

    Raises:
        InvalidPlan: it has others.
    """
    if unknown := sorted(map(str, spec.keys() - fields.keys())):
        raise InvalidPlan(
            f"{what} has no field {', '.join(map(repr, unknown))}",
            expected="; ".join(f"{name}: {text}" for name, text in fields.items()),
        )


def _paths_in(config: JsonObject) -> Iterator[tuple[str, Json]]:
    """Yield (field, path) for every path in an msprobe configuration, also in nested objects."""
    for field, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{field}.{name}", path) for name, path in _paths_in(value))
        elif field in ("dump_path", "bench_path") and value:
            yield field, value


def _wrong(field: str, value: object, expected: str = "") -> InvalidPlan:
    return InvalidPlan(f"{field} is {value!r:.200}", expected=expected or CAPTURE_FIELDS[field])


def _names(spec: JsonObject, field: str, *, required: bool) -> Json:
    value = spec.get(field)
    if value is None and not required:
        return None
    if field == "stages" and value == "all":
        return value
    if isinstance(value, str) or not isinstance(value, Sequence) or (required and not value):
        raise _wrong(field, value)
    if not all(isinstance(item, str) and item for item in value):
        raise _wrong(field, value)
    return list(value)


def _flag(spec: JsonObject, field: str) -> bool:
    value = spec.get(field, False)
    if isinstance(value, bool):
        return value
    raise _wrong(field, value)


def _is_count(value: object, least: int) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return least <= value < STEP_BOUND  # larger ones do not fit into the catalogue


def read_ranks(value: object) -> CaptureRanks:
    """Return the ranks of a request in the form in which they are stored.

    Raises:
        InvalidPlan: not of a form of `CAPTURE_FIELDS`.
    """
    if value in (None, "all"):
        return "all"
    if isinstance(value, str) and (worst := _WORST.fullmatch(value.strip())):
        value = {"worst": int(worst[1])}
    if isinstance(value, Mapping):
        if set(value) != {"worst"} or not _is_count(value["worst"], 1):
            raise _wrong("ranks", value)
        return {"worst": value["worst"]}
    return _numbers(value, "ranks")


def read_steps(value: object) -> CaptureSteps:
    """Return the steps of a request in the form in which they are stored.

    Raises:
        InvalidPlan: not of a form of `CAPTURE_FIELDS`.
    """
    if value == "all":
        return "all"
    if value == "next":
        value = {"next": 1}
    if not isinstance(value, Mapping):
        return _numbers(value, "steps")
    if set(value) == {"next"} and _is_count(value["next"], 1) and value["next"] <= _MAX_NUMBERS:
        return {"next": value["next"]}
    every, start, count = (value.get(name) for name in ("every", "start", "count"))
    if (
        not set(value) <= {"every", "start", "count"}
        or not _is_count(every, 1)
        or not (start is None or _is_count(start, 0))
        or not (count is None or _is_count(count, 1))
    ):
        raise _wrong("steps", value)
    return {"every": value["every"], "start": start, "count": count}


def _numbers(value: object, field: str) -> list[int]:
    """Parse a list of numbers, or a text like `0,4-7`."""
    wrong = _wrong(field, value)
    if isinstance(value, str):
        numbers: list[int] = []
        for item in value.split(","):
            ends = _RANGE.fullmatch(item.strip())
            if ends is None:
                raise wrong
            first, last = int(ends[1]), int(ends[2] or ends[1])
            if not first <= last < first + _MAX_NUMBERS:
                raise wrong
            numbers += range(first, last + 1)
        value = numbers
    # The items of bytes are ints, too.
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | memoryview):
        raise wrong
    if not value or not all(_is_count(item, 0) for item in value):
        raise wrong
    return sorted(set(value))


def _expand_shorthands(spec: JsonObject) -> Json:
    """Return the config of a request, built from its shorthands if it has any."""
    section = {name: spec[name] for name in SHORTHANDS if name in spec}
    if not section:
        return spec.get("config")
    if spec.get("config") is not None or spec.get("config_path") is not None:
        raise InvalidPlan(
            f"a capture has {', '.join(section)} and a config",
            expected="the one or the other: a config may contain them itself",
        )
    task = section.pop("task", "statistics")
    level = section.pop("level", "L1")
    if not isinstance(task, str):
        raise _wrong("task", task, f"one of {', '.join(MSPROBE_TASKS)}")
    for name, value in section.items():
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
            raise _wrong(name, value, SHORTHANDS[name])
        section[name] = list(items)
    return {"task": task, "level": level, **({task: section} if section else {})}


def _timeout(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400:
        raise _wrong("timeout", value, "seconds over 0, up to a day")
    return float(value)


def _late(value: object) -> str:
    if value not in LATE:
        raise _wrong("late", value, f"one of {', '.join(LATE)}")
    return str(value)


def _again(value: object) -> int:
    if isinstance(value, int) and _is_count(value, 0) and value <= 100:
        return value
    raise _wrong("again", value, "a count from 0 to 100")


def _config(value: object) -> dict[str, Json] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong("config", value)
    task, level = value.get("task", "statistics"), value.get("level", "L1")
    if task not in MSPROBE_TASKS:
        raise _wrong("config.task", task, f"one of {', '.join(MSPROBE_TASKS)}")
    if level not in MSPROBE_LEVELS:
        raise _wrong("config.level", level, f"one of {', '.join(MSPROBE_LEVELS)}")
    return dict(value)


def _read_baseline(value: object) -> Baseline | None:
    if value is None:
        return None
    if isinstance(value, Mapping) and set(value) == {"capture_id", "step"}:
        capture_id, step = value["capture_id"], value["step"]
        if isinstance(capture_id, str) and _is_count(step, 0):
            return {"capture_id": capture_id, "step": step}
    raise _wrong("bench", value)


def _check_baseline(capture: CaptureSpec) -> None:
    """Check that a capture with a `bench` has a task for which msprobe supports one."""
    if capture["bench"] is None:
        return
    config = capture["config"] or {}
    if config.get("task") != "tensor":
        raise InvalidPlan(
            "a capture has a bench", expected="task 'tensor', and a config of its own"
        )
    section = config.get("tensor")
    if isinstance(section, Mapping) and section.get("bench_path"):
        raise InvalidPlan(
            "a capture has both bench and config.tensor.bench_path", expected="one of them"
        )


def _limits(value: object) -> CaptureLimits:
    limits: CaptureLimits = {"bytes": None, "seconds": None}
    if not isinstance(value, Mapping) or set(value) - {*limits, "reserve_bytes", "tokens"}:
        raise _wrong("limits", value)
    for name, number in value.items():
        positive = isinstance(number, int | float) and not isinstance(number, bool) and number > 0
        if number is not None and not positive:
            raise _wrong(f"limits.{name}", number, "a number over 0, or null")
    return cast("CaptureLimits", {**limits, **value})


def _path(value: object, field: str, roots: Sequence[str]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or "\0" in value or not os.path.isabs(value):
        raise _wrong(field, value, "an absolute path")
    try:
        resolved = Path(value).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, too long, not UTF-8
        raise InvalidPlan(f"{field} is {value!r:.200}: {error}", expected="a path") from error
    if any(resolved.is_relative_to(Path(root).resolve()) for root in roots):
        return str(resolved)
    raise Forbidden(
        f"{field} {value!r:.200} lies outside the allowed roots",
        expected=f"a path below one of {list(roots)}",
        advice="add a root with STAGESCOPE_ALLOWED_ROOTS when the service is started",
    )


def matches(capture: CaptureScope, *, stage: str, role: str, rank: int, step: int | None) -> bool:
    """Return whether a capture includes this stage of this step on this rank."""
    if capture["stages"] != "all" and stage not in capture["stages"]:
        return False
    roles = capture.get("roles")
    if roles and role not in roles:
        return False
    if not matches_rank(capture["ranks"], rank):
        return False
    steps = capture["steps"]
    if steps == "all":
        return True
    if step is None:
        return False
    if isinstance(steps, Mapping):
        if "every" not in steps:
            return False  # 'next' matches no step before the ranks have agreed on one
        start, every, count = steps["start"] or 0, steps["every"], steps.get("count")
        past, rest = divmod(step - start, every)
        return past >= 0 and rest == 0 and (count is None or past < count)
    return not isinstance(steps, str) and step in steps


def needs_ranks(capture: CaptureSpec) -> bool:
    """Return whether ranks take part: the service alone can keep payloads."""
    return uses_msprobe(capture) or bool(capture.get("parameters") or capture.get("gradients"))


def uses_msprobe(capture: CaptureSpec) -> bool:
    """Return whether msprobe collects something for a capture."""
    return capture.get("config") is not None or capture.get("config_path") is not None


def matches_rank(ranks: CaptureRanks, rank: int) -> bool:
    """Return whether a capture's `ranks` include a rank; an unresolved 'worst(k)' includes none."""
    return ranks == "all" or (not isinstance(ranks, str | Mapping) and rank in ranks)


def unmatched_ranks(ranks: CaptureRanks, live_ranks: Iterable[int]) -> list[int]:
    """Return the ranks that a capture lists by number and that are not live."""
    return [] if isinstance(ranks, str | Mapping) else sorted({*ranks} - {*live_ranks})
