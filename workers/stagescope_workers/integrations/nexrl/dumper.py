"""Wraps NexRL's `DataDumper`: it is called with what is live, and writes what its options say.

NexRL asks `should_dump` before it calls anything, and each `dump_...` asks again before it writes.
The first question is also answered yes where stagescope reports that type; the second one, asked
inside the original function, is answered by NexRL's own options alone. So its files are those of a
training without stagescope.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from stagescope_workers.integrations.guard import guarded
from stagescope_workers.integrations.nexrl import ranks, training
from stagescope_workers.integrations.patches import Function, Wrap

_in_original: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar(
    "stagescope_nexrl_in_original", default=False
)
_OF_TRAINER: Final = frozenset(
    {"trajectory", "prepared_trajectories", "datums", "training_metrics"}
)
_OF_RANK: Final = frozenset({"forward_data", "loss"})


def wrap_should_dump(function: Function) -> Function:
    """Wrap `should_dump(data_type, step)`."""

    @functools.wraps(function)
    def run(dumper: object, data_type: str, step: int, *args: object, **kwargs: object) -> object:
        answer = function(dumper, data_type, step, *args, **kwargs)
        if answer or _in_original.get():
            return answer
        with guarded("what NexRL dumps"):
            if _is_reported(data_type):
                return True
        return answer

    return run


def _is_reported(data_type: str) -> bool:
    if data_type in _OF_TRAINER:
        return training.current() is not None
    return data_type in _OF_RANK and ranks.current() is not None


def _reporting(report: Callable[[dict[str, Any]], None], names: tuple[str, ...]) -> Wrap:
    """Return a wrapper of a `dump_...`: `report` gets its arguments by name."""

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def run(dumper: object, *args: object, **kwargs: object) -> object:
            with guarded(f"{function.__name__} of NexRL"):
                report({**dict(zip(names, args, strict=False)), **kwargs})
            token = _in_original.set(True)
            try:
                return function(dumper, *args, **kwargs)
            finally:
                _in_original.reset(token)

        return run

    return wrap


def _trajectories(given: dict[str, Any]) -> None:
    found = training.current()
    if found is not None:
        found.observe(given["trajectories"])


def _prepared(given: dict[str, Any]) -> None:
    found = training.current()
    if found is not None:
        found.note_prepared(given["trajectories"])


def _datums(given: dict[str, Any]) -> None:
    found = training.current()
    if found is not None:
        found.begin_remote_update(given["datums_data"])


def _metrics(given: dict[str, Any]) -> None:
    found = training.current()
    if found is not None:
        found.end_remote_update(given["metrics"])


def _forward(given: dict[str, Any]) -> None:
    update = ranks.current()
    if update is not None:
        update.record_forward(given)


def _loss(given: Mapping[str, object]) -> None:
    update = ranks.current()
    if update is not None:
        update.log_loss(given)


wrap_trajectory = _reporting(_trajectories, ("step", "trajectories"))
wrap_prepared = _reporting(_prepared, ("step", "trajectories", "advantages", "extra_info"))
wrap_datums = _reporting(_datums, ("step", "datums_data", "extra_info"))
wrap_metrics = _reporting(_metrics, ("step", "metrics", "extra_info"))
wrap_forward_data = _reporting(
    _forward,
    ("step", "micro_idx", "log_probs", "entropy", "response_mask", "input_ids", "extra_info"),
)
wrap_loss = _reporting(
    _loss,
    ("step", "micro_idx", "loss", "pg_loss", "entropy_loss", "metrics", "extra_info"),
)
