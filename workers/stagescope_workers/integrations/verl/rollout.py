"""Reports `rollout_generate`: verl's agent loop workers as ranks, or a configured manager's.

An agent loop worker has verl's whole configuration, so it needs no injected context; only the step
comes with its prompts.

A manager of `agent_loop_manager_class` may have other workers, in which verl's functions do not
run: then its `generate_sequences` is the stage, in the trainer's process, as rank 0.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from stagescope_workers.integrations.configuration import lookup
from stagescope_workers.integrations.patches import Function, after, ending, guarded, staged
from stagescope_workers.integrations.verl import batches, configuration
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.integrations.verl.processes import call_actors, get_probe, has_service
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

_OUT_OF_REACH: Final = (
    "verl's engine runs in separate servers, not in the process of the agent loop"
)
"""Why no operator of the rollout can be captured."""
_INDEX: Final = re.compile(r"_(\d+)_[0-9a-f]+\Z")


@dataclasses.dataclass
class _Generation:
    """A step's prompts that a worker works on at the same time."""

    stage: Stage
    prompts: int = 0
    error: BaseException | None = None


@staged("rollout_generate")
def wrap_generate(worker: object, batch: object, *args: object, **kwargs: object) -> Stage | None:
    """Wrap `AgentLoopWorker.generate_sequences` as a stage; before V1 it runs all prompts."""
    metadata = getattr(batch, "meta_info", None)
    # V1's batch has none: its worker returns at once, see wrap_init.
    if metadata is None or metadata.get("validate"):
        return None
    return _stage(worker, metadata.get("global_steps"))


@after("rollout_generate")
def wrap_init(result: None, worker: Any, *args: object, **kwargs: object) -> None:
    """Wrap `AgentLoopWorker.__init__`: it wraps the method that runs each prompt of V1.

    Ray wraps V1's worker class where it is defined, so the class is pickled by value. Its methods
    cannot be replaced for other processes, but the methods of one object can.
    """
    run_prompt = getattr(worker, "_run_prompt", None)
    if run_prompt is not None:
        worker._run_prompt = _wrap_prompt(worker, run_prompt)


def _wrap_prompt(worker: object, run_prompt: Function) -> Function:
    generations: dict[object, _Generation] = {}

    @functools.wraps(run_prompt)
    async def run(*args: object, **kwargs: object) -> object:
        step: object = None
        with guarded("rollout_generate"):
            step = _begin_prompt(worker, generations, kwargs.get("trajectory"))
        with ending("rollout_generate", functools.partial(_end_prompt, generations, step)):
            return await run_prompt(*args, **kwargs)

    return run


def _begin_prompt(
    worker: object, generations: dict[object, _Generation], trajectory: object
) -> object:
    """Count a prompt that begins; the first of a step begins the stage."""
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


def _end_prompt(
    generations: dict[object, _Generation], step: object, error: BaseException | None
) -> None:
    """Count a prompt that ends; the last of a step ends the stage."""
    generation = generations.get(step)
    if generation is None:
        return
    generation.prompts -= 1
    generation.error = generation.error or error
    if generation.prompts == 0:
        del generations[step]
        generation.stage.end(generation.error)


def _stage(worker: Any, step: object) -> Stage | None:
    if not isinstance(step, int) or step < 0 or not has_service():
        return None
    config = worker.config
    context = _context(config, step)
    probe = _probe(worker, context)
    asynchronous = str(lookup(config, "trainer", "v1", "trainer_mode") or "sync") != "sync"
    is_v1 = bool(lookup(config, "trainer", "use_v1"))
    if is_v1 and asynchronous:
        # The step that will consume these prompts is not known yet: the version is the clock.
        return probe.stage("rollout_generate", policy_version=context.policy_version)
    return probe.stage("rollout_generate", step=step, policy_version=context.policy_version)


def _probe(worker: Any, context: Context) -> Probe:
    config = worker.config
    workers = lookup(config, "actor_rollout_ref", "rollout", "agent", "num_workers")
    return get_probe(
        context,
        "rollout",
        _index(),
        world_size=workers,
        describe=lambda: {
            "captures": _OUT_OF_REACH,
            "layout": _layout(config),
            "settings": configuration.statistics_settings(config),
        },
    )


@after("the run's name in agent loops")
def wrap_manager_init(result: None, manager: Any, *args: object, **kwargs: object) -> None:
    """Wrap `AgentLoopManager.__init__`: its workers get the driver's names with their config."""
    manager.config = configuration.with_names(manager.config)


def _context(config: object, step: int) -> Context:
    run, attempt_key = configuration.names(config)
    return Context(run=run, attempt_key=attempt_key, step=step)


def _layout(config: object) -> dict[str, object]:
    engine = lookup(config, "actor_rollout_ref", "rollout", "name")
    return {"framework": "verl", **({"engine": str(engine)} if engine else {})}


def _index() -> int:
    """Return the index of this agent loop worker, which only its actor's name contains."""
    ray: Any = sys.modules.get("ray")
    name = ray.get_runtime_context().get_actor_name() or ""
    found = _INDEX.search(name)
    return int(found.group(1)) if found else 0


_log = logging.getLogger("stagescope.verl")

_LOOPS: Final = "verl.experimental.agent_loop.agent_loop"
_ATTRIBUTES: Final = ("async_rollout_manager", "agent_loop_manager")
"""The attribute of a V0 or V1 trainer that is the manager."""
_WRAPPED: Final = "_stagescope_watched"

_logged: Final[set[str]] = set()


def wrap_manager(trainer: object, make_stage: Callable[[], Stage | None], *given: object) -> None:
    """Wrap the manager's `generate_sequences` as a stage where its workers report none.

    Where that is not possible, it is logged once per class.

    Args:
        trainer: the manager's trainer.
        make_stage: returns the stage of the current step; None where nothing is reported.
        given: the arguments of `fit`, which in V1 is given the manager.
    """
    manager = _manager(trainer, *given)
    if manager is None or _workers_report(manager) or hasattr(manager, _WRAPPED):
        return
    name = f"{type(manager).__module__}.{type(manager).__qualname__}"
    generate = getattr(manager, "generate_sequences", None)
    if not callable(generate):
        _warn_once(name, "it has no generate_sequences")
    elif batches.is_v1(trainer):
        _warn_once(name, "with V1 its generate_sequences returns before anything is generated")
    else:
        manager.generate_sequences = _wrap_generate(generate, make_stage)
        setattr(manager, _WRAPPED, True)


def reports_manager(trainer: object) -> bool:
    """Return whether `wrap_manager` reports a trainer's manager, in the trainer's process."""
    return hasattr(_manager(trainer), _WRAPPED)


def connect_workers(trainer: object, *given: object) -> None:
    """Have the manager's agent loop workers make their probes, before the first step.

    Args:
        trainer, given: as in `wrap_manager`.
    """
    manager = _manager(trainer, *given)
    if manager is not None and _workers_report(manager):
        call_actors(getattr(manager, "agent_loop_workers", None) or (), make_probe)


def make_probe(worker: Any) -> None:
    """Make the probe of an agent loop worker; runs in its process."""
    with guarded("connecting an agent loop worker"):
        if has_service():
            _probe(worker, _context(worker.config, 0))


def _manager(trainer: object, *given: object) -> Any:
    attributes = [getattr(trainer, name, None) for name in _ATTRIBUTES]
    managers = [each for each in given if hasattr(each, "generate_sequences")]
    return next((each for each in (*managers, *attributes) if each is not None), None)


def _workers_report(manager: object) -> bool:
    """Return whether a manager's workers are agent loop workers whose methods are wrapped."""
    base = getattr(sys.modules.get(_LOOPS), "AgentLoopWorker", None)
    workers = getattr(manager, "agent_loop_workers_class", None)
    # `ray.remote` keeps the original class here.
    kind = getattr(getattr(workers, "__ray_metadata__", None), "modified_class", workers)
    if base is None or not isinstance(kind, type) or not issubclass(kind, base):
        return False
    if hasattr(kind, "_run_prompt"):
        return True
    # `ray.remote` wraps the methods of the class that it creates.
    generate: Any = getattr(kind, "generate_sequences", None)
    return inspect.unwrap(generate) is inspect.unwrap(base.generate_sequences)


def _warn_once(name: str, reason: str) -> None:
    if name not in _logged:
        _logged.add(name)
        _log.warning("not reported with agent_loop_manager_class %s: rollout_generate; %s; its "
                     "workers report it where they derive from verl's AgentLoopWorker",
                     name, reason)  # fmt: skip


def _wrap_generate(
    generate: Callable[..., object], make_stage: Callable[[], Stage | None]
) -> Callable[..., object]:
    @functools.wraps(generate)
    def run(*args: object, **kwargs: object) -> object:
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


async def _awaited(result: Awaitable[object], stage: Stage | None) -> object:
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
