"""What a capture may order, and which stages it concerns: shared by ranks, service and client.

A capture is a plain dict, so that it travels and is stored as it is; `validate_capture` is the one
place that says what it may hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope.errors import Forbidden, InvalidPlan
from stagescope.schema import check_run_name

CAPTURE_FIELDS: Final[Mapping[str, str]] = {
    "run": "a run's name, or null for every run",
    "stages": "a list of stage names, or 'all'",
    "roles": "a list of roles, or null for every role",
    "ranks": "a list of ranks from 0, or 'all'",
    "steps": "a list of steps, 'all', or {'every': n, 'start': s, 'count': c}",
    "config": "the content of msprobe's config.json, or null to keep tensors only",
    "config_path": "the path of an msprobe config.json that the ranks can read, or null",
    "data_dir": "where the dumps go, or null for the service's data_dir",
    "keep": "names of payload tensors to keep as safetensors",
    "limits": "{'bytes': most bytes a dump may take, 'seconds': most time, 'reserve_bytes': kept "
    "free on the disk, 'tokens': of the stage, for the estimate}, or null",
    "force": "whether to start although the estimate does not fit on the disk",
    "strict": "whether a failure is raised in the training process",
}
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
    unknown = sorted(map(str, set(spec) - set(CAPTURE_FIELDS)))
    if unknown:
        raise InvalidPlan(
            f"a capture has no field {', '.join(map(repr, unknown))}",
            expected="; ".join(f"{name}: {text}" for name, text in CAPTURE_FIELDS.items()),
        )
    roots = list(allowed_roots)
    capture: dict[str, Any] = {
        "run": None if spec.get("run") is None else check_run_name(spec["run"]),
        "stages": _names(spec, "stages", required=True),
        "roles": _names(spec, "roles", required=False),
        "ranks": _numbers(spec, "ranks", "all"),
        "steps": _steps(spec.get("steps")),
        "config": _config(spec.get("config")),
        "config_path": _path(spec.get("config_path"), "config_path", roots),
        "data_dir": _path(spec.get("data_dir"), "data_dir", roots),
        "keep": _names(spec, "keep", required=False) or [],
        "limits": _limits(spec.get("limits")),
        "force": _flag(spec, "force"),
        "strict": _flag(spec, "strict"),
    }
    if capture["config"] is not None and capture["config_path"] is not None:
        raise InvalidPlan(
            "a capture has both config and config_path", expected="one of them, or none"
        )
    for field, path in _paths_in(capture["config"] or {}):
        _path(path, f"config.{field}", roots)
    if capture["config"] is None and capture["config_path"] is None and not capture["keep"]:
        raise InvalidPlan(
            "a capture orders nothing",
            expected="config or config_path for msprobe, or names of tensors in keep",
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


def _numbers(spec: Mapping[str, Any], field: str, default: Any) -> Any:
    value = spec.get(field, default)
    if value in (None, "all"):
        return "all"
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidPlan(f"{field} is {value!r:.200}", expected=CAPTURE_FIELDS[field])
    if not all(_is_count(item, 0) for item in value):
        raise InvalidPlan(f"{field} is {value!r:.200}", expected=CAPTURE_FIELDS[field])
    return sorted(set(value))


def _steps(value: Any) -> Any:
    if value == "all":
        return value
    expected = CAPTURE_FIELDS["steps"]
    if isinstance(value, Mapping):
        if set(value) - {"every", "start", "count"} or not _is_count(value.get("every"), 1):
            raise InvalidPlan(f"steps is {value!r:.200}", expected=expected)
        start, count = value.get("start", 0), value.get("count")
        if not _is_count(start, 0) or not (count is None or _is_count(count, 1)):
            raise InvalidPlan(f"steps is {value!r:.200}", expected=expected)
        return {"every": value["every"], "start": start, "count": count}
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidPlan(f"steps is {value!r:.200}", expected=expected)
    if not all(_is_count(item, 0) for item in value):
        raise InvalidPlan(f"steps is {value!r:.200}", expected=expected)
    return sorted(set(value))


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
    if capture["ranks"] != "all" and rank not in capture["ranks"]:
        return False
    steps = capture["steps"]
    if steps == "all":
        return True
    if step is None:
        return False
    if isinstance(steps, Mapping):
        start, every, count = steps["start"], steps["every"], steps.get("count")
        past, rest = divmod(step - start, every)
        return past >= 0 and rest == 0 and (count is None or past < count)
    return step in steps
