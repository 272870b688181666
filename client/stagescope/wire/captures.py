"""What a capture may order, and which stages it concerns: shared by ranks, service and client.

A capture is a plain dict, so that it travels and is stored as it is; `validate_capture` is the one
place that says what it may hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope.wire.errors import Forbidden, InvalidPlan
from stagescope.wire.schema import check_run_name

CAPTURE_FIELDS: Final[Mapping[str, str]] = {
    "run": "a run's name, or null: the live run whose training stage began last; of steps by "
    "number, where none is live, every run",
    "stages": "a list of stage names, or 'all'",
    "roles": "a list of roles, or null for every role",
    "ranks": "a list of ranks from 0, a text like '0,4-7', 'worst(k)', or 'all'",
    "steps": "a list of steps, a text like '5,8-10', 'next', {'next': k}, 'all', or {'every': n, "
    "'start': s, 'count': c}; without a start: from the step that the ranks agree on",
    "config": "the content of msprobe's config.json, or null to keep tensors only",
    "config_path": "the path of an msprobe config.json that the ranks can read, or null",
    "bench": "{'capture_id': id, 'step': n}: an earlier capture with summary_mode 'md5'; of this "
    "one, of task 'tensor', msprobe writes only the tensors of operators that give another output "
    "for equal inputs",
    "data_dir": "where the dumps go, or null for the service's data_dir",
    "keep": "names of payload tensors to keep as safetensors",
    "parameters": "patterns of parameter names, such as '*.q_proj.weight', to keep each rank's "
    "shards of at the stage's end",
    "gradients": "patterns of parameter names to keep the gradients of, each rank's shards",
    "limits": "{'bytes': most bytes a dump may take, 'seconds': most time, 'reserve_bytes': kept "
    "free on the disk, 'tokens': of the stage, for the estimate}, or null",
    "force": "whether to start although the estimate does not fit on the disk, or a stage that "
    "nobody did lately is named much like one of the run, or the run much like another",
    "strict": "whether a failure is raised in the training process",
    "timeout": "seconds in which every asked rank is to acknowledge, 60 by default",
    "late": "what to do about ranks that do not: 'wait', 'go_on' without them, or 'give_up'",
    "again": "how often a step that some rank missed is agreed again, 0 by default",
}
SHORTHANDS: Final[Mapping[str, str]] = {
    "task": "msprobe's task, 'statistics' by default",
    "level": "msprobe's level, 'L1' by default",
    "scope": "msprobe's scope: two names between which is collected",
    "list": "msprobe's list: names of what is collected",
    "data_mode": "msprobe's data_mode: 'all', or some of 'forward', 'backward', 'input', 'output'",
}
"""Instead of a config: what most orders say of it."""

_WHAT: Final = ("config", "config_path", "keep", "parameters", "gradients", *SHORTHANDS)
"""An order that names none of these is of msprobe's statistics."""

LATE: Final = ("wait", "go_on", "give_up")
_WORST: Final = re.compile(r"worst\((\d{1,6})\)")
_RANGE: Final = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?")
_MOST_NUMBERS: Final = 100_000
_MSPROBE_TASKS: Final = ("statistics", "tensor", "structure", "nan_check", "acc_check")
_MSPROBE_LEVELS: Final = ("L0", "L1", "L2", "mix", "debug")


def validate_capture(spec: Mapping[str, Any], *, allowed_roots: Iterable[str]) -> dict[str, Any]:
    """Return `spec` with every field present and checked.

    Raises:
        InvalidPlan: an unknown field, or a value that cannot be carried out.
        Forbidden: a path outside `allowed_roots`.
    """
    if not isinstance(spec, Mapping):
        raise InvalidPlan(f"a capture is {spec!r:.200}", expected=f"fields {list(CAPTURE_FIELDS)}")
    unknown = sorted(map(str, set(spec) - set(CAPTURE_FIELDS) - set(SHORTHANDS)))
    if unknown:
        known = {**CAPTURE_FIELDS, **SHORTHANDS}
        raise InvalidPlan(
            f"a capture has no field {', '.join(map(repr, unknown))}",
            expected="; ".join(f"{name}: {text}" for name, text in known.items()),
        )
    if spec.keys().isdisjoint(_WHAT):
        spec = {**spec, "task": "statistics"}
    roots = list(allowed_roots)
    capture: dict[str, Any] = {
        "run": None if spec.get("run") is None else check_run_name(spec["run"]),
        "stages": _names(spec, "stages", required=True),
        "roles": _names(spec, "roles", required=False),
        "ranks": read_ranks(spec.get("ranks", "all")),
        "steps": read_steps(spec.get("steps")),
        "config": _config(_written_out(spec)),
        "config_path": _path(spec.get("config_path"), "config_path", roots),
        "bench": _bench(spec.get("bench")),
        "data_dir": _path(spec.get("data_dir"), "data_dir", roots),
        "keep": _names(spec, "keep", required=False) or [],
        "parameters": _names(spec, "parameters", required=False) or [],
        "gradients": _names(spec, "gradients", required=False) or [],
        "limits": _limits(spec.get("limits")),
        "force": _flag(spec, "force"),
        "strict": _flag(spec, "strict"),
        "timeout": _timeout(spec.get("timeout")),
        "late": _late(spec.get("late")),
        "again": _again(spec.get("again")),
    }
    if capture["config"] is not None and capture["config_path"] is not None:
        raise InvalidPlan(
            "a capture has both config and config_path", expected="one of them, or none"
        )
    for field, path in _paths_in(capture["config"] or {}):
        _path(path, f"config.{field}", roots)
    _check_bench(capture)
    if not needs_ranks(capture) and not capture["keep"]:
        raise InvalidPlan(
            "a capture orders nothing",
            expected="config or config_path for msprobe, names of tensors in keep, or patterns in "
            "parameters or gradients",
        )
    return capture


def _paths_in(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the paths that an msprobe configuration names, wherever they stand in it."""
    for field, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{field}.{name}", path) for name, path in _paths_in(value))
        elif field in ("dump_path", "bench_path") and value:
            yield field, value


def _names(spec: Mapping[str, Any], field: str, *, required: bool) -> Any:
    value = spec.get(field)
    if value is None and not required:
        return None
    if field == "stages" and value == "all":
        return value
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidPlan(f"{field} is {value!r:.200}", expected=CAPTURE_FIELDS[field])
    if (not value and required) or not all(isinstance(item, str) and item for item in value):
        raise InvalidPlan(f"{field} is {value!r:.200}", expected=CAPTURE_FIELDS[field])
    return list(value)


def _flag(spec: Mapping[str, Any], field: str) -> bool:
    value = spec.get(field)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidPlan(f"{field} is {value!r:.200}", expected=CAPTURE_FIELDS[field])


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def read_ranks(value: Any) -> Any:
    """Return the ranks of an order as they are stored; raises `InvalidPlan`."""
    if value in (None, "all"):
        return "all"
    if isinstance(value, str) and (worst := _WORST.fullmatch(value.strip())):
        value = {"worst": int(worst[1])}
    if isinstance(value, Mapping):
        if set(value) != {"worst"} or not _is_count(value["worst"], 1):
            raise InvalidPlan(f"ranks is {value!r:.200}", expected=CAPTURE_FIELDS["ranks"])
        return dict(value)
    return _numbers(value, "ranks")


def read_steps(value: Any) -> Any:
    """Return the steps of an order as they are stored; raises `InvalidPlan`."""
    if value == "all":
        return value
    expected = CAPTURE_FIELDS["steps"]
    if value == "next":
        value = {"next": 1}
    if isinstance(value, Mapping) and set(value) == {"next"}:
        if not _is_count(value["next"], 1) or value["next"] > _MOST_NUMBERS:
            raise InvalidPlan(f"steps is {value!r:.200}", expected=expected)
        return dict(value)
    if isinstance(value, Mapping):
        if set(value) - {"every", "start", "count"} or not _is_count(value.get("every"), 1):
            raise InvalidPlan(f"steps is {value!r:.200}", expected=expected)
        start, count = value.get("start"), value.get("count")
        if not all(
            item is None or _is_count(item, least) for item, least in ((start, 0), (count, 1))
        ):
            raise InvalidPlan(f"steps is {value!r:.200}", expected=expected)
        return {"every": value["every"], "start": start, "count": count}
    return _numbers(value, "steps")


def _numbers(value: Any, field: str) -> list[int]:
    """Read a list of numbers, or a text like `0,4-7`."""
    wrong = InvalidPlan(f"{field} is {value!r:.200}", expected=CAPTURE_FIELDS[field])
    if isinstance(value, str):
        found: list[int] = []
        for word in value.split(","):
            ends = _RANGE.fullmatch(word.strip())
            if ends is None:
                raise wrong
            first, last = int(ends[1]), int(ends[2] or ends[1])
            if not first <= last < first + _MOST_NUMBERS:
                raise wrong
            found += range(first, last + 1)
        value = found
    if not isinstance(value, Sequence) or not value:
        raise wrong
    if not all(_is_count(item, 0) for item in value):
        raise wrong
    return sorted(set(value))


def _written_out(spec: Mapping[str, Any]) -> Any:
    """Return the config of a spec, made from its shorthands where it has some."""
    short = {name: spec[name] for name in SHORTHANDS if spec.get(name) is not None}
    if not short:
        return spec.get("config")
    if spec.get("config") is not None or spec.get("config_path") is not None:
        raise InvalidPlan(
            f"a capture has {', '.join(short)} and a config",
            expected="the one or the other: a config may say them itself",
        )
    task = short.pop("task", "statistics")
    level = short.pop("level", "L1")
    if not isinstance(task, str):
        raise InvalidPlan(f"task is {task!r:.200}", expected=f"one of {_MSPROBE_TASKS}")
    for name, value in short.items():
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
            raise InvalidPlan(f"{name} is {value!r:.200}", expected=SHORTHANDS[name])
        short[name] = list(words)
    return {"task": task, "level": level, **({task: short} if short else {})}


def _timeout(value: Any) -> float:
    if value is None:
        return 60.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400:
        raise InvalidPlan(f"timeout is {value!r:.200}", expected="seconds over 0, up to a day")
    return float(value)


def _late(value: Any) -> str:
    if value is None:
        return LATE[0]
    if value not in LATE:
        raise InvalidPlan(f"late is {value!r:.200}", expected=f"one of {', '.join(LATE)}")
    return str(value)


def _again(value: Any) -> int:
    if value is None:
        return 0
    if not _is_count(value, 0) or value > 100:
        raise InvalidPlan(f"again is {value!r:.200}", expected="a count from 0 to 100")
    return int(value)


def _config(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidPlan(f"config is {value!r:.200}", expected=CAPTURE_FIELDS["config"])
    task, level = value.get("task", "statistics"), value.get("level", "L1")
    if task not in _MSPROBE_TASKS:
        raise InvalidPlan(f"config.task is {task!r}", expected=f"one of {_MSPROBE_TASKS}")
    if level not in _MSPROBE_LEVELS:
        raise InvalidPlan(f"config.level is {level!r}", expected=f"one of {_MSPROBE_LEVELS}")
    return dict(value)


def _bench(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    expected = CAPTURE_FIELDS["bench"]
    if not isinstance(value, Mapping) or set(value) != {"capture_id", "step"}:
        raise InvalidPlan(f"bench is {value!r:.200}", expected=expected)
    if not isinstance(value["capture_id"], str) or not _is_count(value["step"], 0):
        raise InvalidPlan(f"bench is {value!r:.200}", expected=expected)
    return dict(value)


def _check_bench(capture: Mapping[str, Any]) -> None:
    """Check that msprobe compares with a bench only what it takes one for."""
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


def _limits(value: Any) -> dict[str, Any]:
    limits = {"bytes": None, "seconds": None}
    if value is None:
        return limits
    if not isinstance(value, Mapping) or set(value) - {*limits, "reserve_bytes", "tokens"}:
        raise InvalidPlan(f"limits is {value!r:.200}", expected=CAPTURE_FIELDS["limits"])
    for name, number in value.items():
        positive = isinstance(number, int | float) and not isinstance(number, bool) and number > 0
        if number is not None and not positive:
            raise InvalidPlan(f"limits.{name} is {number!r}", expected="a number over 0, or null")
    return {**limits, **value}


def _path(value: Any, field: str, roots: Sequence[str]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidPlan(f"{field} is {value!r:.200}", expected="a path")
    if not os.path.isabs(value):
        raise InvalidPlan(f"{field} is {value!r:.200}", expected="an absolute path")
    try:
        resolved = Path(value).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, too long, no UTF-8
        raise InvalidPlan(f"{field} is {value!r:.200}: {error}", expected="a path") from error
    if any(resolved.is_relative_to(Path(root).resolve()) for root in roots):
        return str(resolved)
    raise Forbidden(
        f"{field} {value!r:.200} lies outside the allowed roots",
        expected=f"a path below one of {list(roots)}",
        advice="add a root with STAGESCOPE_ALLOWED_ROOTS when the service is started",
    )


def matches(
    capture: Mapping[str, Any], *, stage: str, role: str, rank: int, step: int | None
) -> bool:
    """Return whether a capture orders this stage of this step on this rank."""
    if capture["stages"] != "all" and stage not in capture["stages"]:
        return False
    if capture.get("roles") and role not in capture["roles"]:
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
            return False  # 'next' says nothing before it is agreed on
        start, every, count = steps["start"] or 0, steps["every"], steps.get("count")
        past, rest = divmod(step - start, every)
        return past >= 0 and rest == 0 and (count is None or past < count)
    return step in steps


def needs_ranks(capture: Mapping[str, Any]) -> bool:
    """Return whether ranks have something to do: payloads are kept by the service alone."""
    return orders_msprobe(capture) or bool(capture.get("parameters") or capture.get("gradients"))


def orders_msprobe(capture: Mapping[str, Any]) -> bool:
    """Return whether a capture is one by msprobe."""
    return capture.get("config") is not None or capture.get("config_path") is not None


def matches_rank(ranks: Any, rank: int) -> bool:
    """Return whether a capture's `ranks` name a rank; 'worst(k)' names none before it is known."""
    return ranks == "all" or (not isinstance(ranks, Mapping) and rank in ranks)


def unmatched_ranks(ranks: Any, there: Iterable[int]) -> list[int]:
    """Return the ranks that a capture names by number and that are not among `there`."""
    return [] if ranks == "all" or isinstance(ranks, Mapping) else sorted({*ranks} - {*there})
