"""`rollout_generate` of an agent loop manager that the configuration names.

verl's own agent loop workers report the stage themselves, a rank for each (`rollout`). A manager of
`agent_loop_manager_class` may have others, which verl's functions do not run in: then the stage is
what its `generate_sequences` does, in the trainer's process, as rank 0.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from stagescope_workers.integrations.verl import batches
from stagescope_workers.integrations.verl.guard import guarded
from stagescope_workers.probe.stage import Stage

_log = logging.getLogger("stagescope.verl")

_LOOPS: Final = "verl.experimental.agent_loop.agent_loop"
_ATTRIBUTES: Final = ("async_rollout_manager", "agent_loop_manager")
"""Where V0 and V1 keep the manager."""
_WATCHED: Final = "_stagescope_watched"

_said: Final[set[str]] = set()


def watch_manager(trainer: Any, make_stage: Callable[[], Stage | None]) -> None:
    """Make a stage of the manager's `generate_sequences` where its workers report none.

    Where that is not possible it is logged, once a class.

    Args:
        trainer: has the manager.
        make_stage: returns the stage of the present step; None where nothing is to be reported.
    """
    manager = next((m for n in _ATTRIBUTES if (m := getattr(trainer, n, None)) is not None), None)
    if manager is None or _workers_report(manager) or hasattr(manager, _WATCHED):
        return
    name = f"{type(manager).__module__}.{type(manager).__qualname__}"
    generate = getattr(manager, "generate_sequences", None)
    if not callable(generate):
        _say(name, "it has no generate_sequences")
    elif batches.is_v1(trainer):
        _say(name, "with V1 its generate_sequences returns before anything is generated")
    else:
        manager.generate_sequences = _as_stage(generate, make_stage)
        setattr(manager, _WATCHED, True)


def _workers_report(manager: Any) -> bool:
    """Say whether a manager's workers are agent loop workers whose methods are ours."""
    base = getattr(sys.modules.get(_LOOPS), "AgentLoopWorker", None)
    workers = getattr(manager, "agent_loop_workers_class", None)
    # What `ray.remote` makes of a class holds the class here.
    kind = getattr(getattr(workers, "__ray_metadata__", None), "modified_class", workers)
    if base is None or not isinstance(kind, type) or not issubclass(kind, base):
        return False
    own: Any = kind
    if hasattr(own, "_run_prompt"):
        return True
    # `ray.remote` wraps the methods of the class that it makes.
    return inspect.unwrap(own.generate_sequences) is inspect.unwrap(base.generate_sequences)


def _say(name: str, reason: str) -> None:
    if name not in _said:
        _said.add(name)
        _log.warning("not reported with agent_loop_manager_class %s: rollout_generate; %s; its "
                     "workers report it where they derive from verl's AgentLoopWorker",
                     name, reason)  # fmt: skip


def _as_stage(
    generate: Callable[..., Any], make_stage: Callable[[], Stage | None]
) -> Callable[..., Any]:
    @functools.wraps(generate)
    def run(*args: Any, **kwargs: Any) -> Any:
        stage: Stage | None = None
        with guarded("rollout_generate"):
            stage = make_stage()
            if stage is not None:
                stage.begin()
        try:
            result = generate(*args, **kwargs)
        except BaseException as error:
            _end(stage, error)
            raise
        if inspect.isawaitable(result):  # verl decides by whether a loop runs
            return _awaited(result, stage)
        _end(stage, None)
        return result

    return run


async def _awaited(result: Awaitable[Any], stage: Stage | None) -> Any:
    try:
        found = await result
    except BaseException as error:
        _end(stage, error)
        raise
    _end(stage, None)
    return found


def _end(stage: Stage | None, error: BaseException | None) -> None:
    if stage is not None:
        with guarded("rollout_generate"):
            stage.end(error)
