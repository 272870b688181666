"""`rollout_generate`: what verl's agent loop workers do, a rank for each of them.

An agent loop worker has verl's whole configuration, so it needs no planted context; only the step
comes with its prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from stagescope_workers.integrations.verl import configuration
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.integrations.verl.guard import guarded, running
from stagescope_workers.integrations.verl.processes import is_there, probe_of
from stagescope_workers.probe.stage import Stage

Function = Callable[..., Any]

_INDEX: Final = re.compile(r"_(\d+)_[0-9a-f]+\Z")


@dataclasses.dataclass
class _Generation:
    """A step's prompts that a worker works on at the same time."""

    stage: Stage
    prompts: int = 0
    error: BaseException | None = None


def run_generate(function: Function) -> Function:
    """Return `AgentLoopWorker.generate_sequences` (before V1: it returns when all are done)."""

    async def run(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        stage: Stage | None = None
        with guarded("rollout_generate"):
            about = getattr(batch, "meta_info", None)
            # V1's batch has none: its worker returns at once, see run_init.
            if about is not None and not about.get("validate"):
                stage = _stage(worker, about.get("global_steps"))
        with running(stage):
            return await function(worker, batch, *args, **kwargs)

    return run


def run_init(function: Function) -> Function:
    """Return `AgentLoopWorker.__init__` that watches each prompt of V1's workers.

    V1's worker class is wrapped by Ray where it is defined, so that it travels by value and its
    methods cannot be replaced for other processes; those of one object can.
    """

    def run(worker: Any, *args: Any, **kwargs: Any) -> None:
        function(worker, *args, **kwargs)
        with guarded("rollout_generate"):
            run_prompt = getattr(worker, "_run_prompt", None)
            if run_prompt is not None:
                worker._run_prompt = _watched(worker, run_prompt)

    return run


def _watched(worker: Any, run_prompt: Function) -> Function:
    generations: dict[Any, _Generation] = {}

    @functools.wraps(run_prompt)
    async def run(*args: Any, **kwargs: Any) -> Any:
        step: Any = None
        with guarded("rollout_generate"):
            step = _enter(worker, generations, kwargs.get("trajectory"))
        error: BaseException | None = None
        try:
            return await run_prompt(*args, **kwargs)
        except BaseException as caught:
            error = caught
            raise
        finally:
            with guarded("rollout_generate"):
                _leave(generations, step, error)

    return run


def _enter(worker: Any, generations: dict[Any, _Generation], trajectory: Any) -> Any:
    """Count a prompt in; the first of a step begins the stage."""
    if not isinstance(trajectory, dict) or trajectory.get("validate"):
        return None
    step = trajectory.get("step")
    if step not in generations:
        stage = _stage(worker, step)
        if stage is None:
            return None
        stage.begin()
        generations[step] = _Generation(stage)
    generations[step].prompts += 1
    return step


def _leave(generations: dict[Any, _Generation], step: Any, error: BaseException | None) -> None:
    """Count a prompt out; the last of a step ends the stage."""
    generation = generations.get(step)
    if generation is None:
        return
    generation.prompts -= 1
    generation.error = generation.error or error
    if generation.prompts == 0:
        del generations[step]
        generation.stage.end(generation.error)


def _stage(worker: Any, step: Any) -> Stage | None:
    if not isinstance(step, int) or step < 0 or not is_there():
        return None
    config = worker.config
    context = _context(config, step)
    probe = probe_of(
        context,
        "rollout",
        _index(),
        world_size=configuration.at(config, "actor_rollout_ref", "rollout", "agent", "num_workers"),
        describe=lambda: {
            "layout": _layout(config),
            "settings": configuration.shaping(config),
        },
    )
    asynchronous = (
        str(configuration.at(config, "trainer", "v1", "trainer_mode") or "sync") != "sync"
    )
    is_v1 = bool(configuration.at(config, "trainer", "use_v1"))
    if is_v1 and asynchronous:
        # Which step will consume these prompts is not known yet: the weights are the clock.
        return probe.stage("rollout_generate", policy_version=context.policy_version)
    return probe.stage("rollout_generate", step=step, policy_version=context.policy_version)


def run_manager_init(function: Function) -> Function:
    """Return `AgentLoopManager.__init__`: its workers get the driver's names with their config."""

    def run(manager: Any, *args: Any, **kwargs: Any) -> None:
        function(manager, *args, **kwargs)
        with guarded("the run's name in agent loops"):
            manager.config = configuration.with_names(manager.config)

    return run


def _context(config: Any, step: int) -> Context:
    run, attempt_key = configuration.names(config)
    return Context(run=run, attempt_key=attempt_key, step=step)


def _layout(config: Any) -> dict[str, Any]:
    engine = configuration.at(config, "actor_rollout_ref", "rollout", "name")
    return {"framework": "verl", **({"engine": str(engine)} if engine else {})}


def _index() -> int:
    """Return which agent loop worker this process is: verl says it in the actor's name alone."""
    ray: Any = sys.modules.get("ray")
    name = ray.get_runtime_context().get_actor_name() or ""
    found = _INDEX.search(name)
    return int(found.group(1)) if found else 0
