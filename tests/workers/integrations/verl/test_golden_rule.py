"""verl's functions, whatever breaks in ours: called once, as they were, with what they were given.

Each of our parts is broken in turn; then every function that is patched is called, patched and
not, and must behave the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.trainers import verl_fakes
from tests.support.trainers.verl_fakes import Seen, fake_modules

from stagescope_workers.integrations.training import MicrobatchBuffer
from stagescope_workers.integrations.verl import (
    batches,
    configuration,
    context,
    driver,
    hooks,
    minibatches,
    processes,
    ranks,
    rollout,
    trainer_calls,
)
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.integrations.verl.modes import FLOAT32, Mode
from stagescope_workers.metrics_feed import MetricsFeed
from stagescope_workers.probe.options import checked_options
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

Call = Callable[[], object]

PARTS: list[tuple[Any, str]] = [
    *((Stage, name) for name in ("begin", "end", "record", "log")),
    *((Probe, name) for name in ("stage", "begin", "log", "end_step")),
    *((MetricsFeed, name) for name in ("__init__", "prepare", "request", "get", "close")),
    *(
        (driver.Driver, name)
        for name in ("__init__", "context", "inject_context", "stage", "record")
    ),
    *(
        (driver.Driver, name)
        for name in ("request_numbers", "log", "close", "_probe", "wrap_rollout", "connect")
    ),
    *((driver, name) for name in ("has_service", "finish", "MetricsFeed")),
    *(
        (rollout, name)
        for name in ("has_service", "_index", "_layout", "_context", "_begin_prompt", "_end_prompt")
    ),
    (rollout, "_wrap_prompt"),
    (driver, "connect_workers"),
    (driver, "reports_manager"),
    (processes, "call_actors"),
    *(
        (trainer_calls, name)
        for name in ("get_driver", "current_mode", "_record_log_probs", "_is_nested_call")
    ),
    (trainer_calls, "_wrap_own_fit"),
    (processes, "init"),
    *(
        (ranks, name)
        for name in ("get_probe", "is_critic", "is_active", "_read_context", "_weight_sync")
    ),
    (ranks, "Minibatches"),
    *((context, name) for name in ("extract", "parse", "inject", "non_tensor", "row_strings")),
    *(
        (batches, name)
        for name in ("is_keys", "is_v1", "is_synchronous", "log_probs", "advantages")
    ),
    *((batches, name) for name in ("name_samples", "ids", "constant_versions", "versions")),
    *((batches, name) for name in ("in_float32", "at_least_float32")),
    *(
        (configuration, name)
        for name in ("run_name", "attempt_key", "is_bypass", "settings", "statistics_settings")
    ),
    *((configuration, name) for name in ("streams", "profiler", "names", "with_names", "lookup")),
    (ranks, "describe"),
    *((MicrobatchBuffer, name) for name in ("__init__", "add", "pop_all")),
    *((minibatches.Minibatches, name) for name in ("advance", "_versions")),
]
"""What is broken in turn; parts that a wrapper must reach are broken where it finds them."""

ENDINGS: list[BaseException | None] = [
    None, ValueError("verl's own"), StopIteration("verl's own"), KeyboardInterrupt(), SystemExit(3),
]  # fmt: skip
ASYNCHRONOUS = ("update_weights", "generate_sequences", "_run_prompt")


class Broken:
    """Stands in for one of our parts, and raises."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.count += 1
        raise RuntimeError("ours is broken")


def planted(*, bypass: bool = False) -> object:
    return verl_fakes.with_notes(
        verl_fakes.tensors(log_probs=torch.zeros(4, 3)),
        **{context.KEY: told(bypass=bypass), "mini_batch_size": 4, "epochs": 2},
    )


def told(*, bypass: bool) -> str:
    return Context(run="r", attempt_key="a", step=3, synchronous=True, bypass=bypass).text()


def calls(modules: dict[str, ModuleType], seen: Seen) -> Iterator[tuple[str, Call]]:
    """Yield each patched function's name with a call of it, as verl calls it."""
    for v1 in (False, True):
        yield from _trainer_calls(modules, seen, v1)
    yield from _number_calls(modules, seen)
    yield from _worker_calls(modules, seen)
    yield from _older_calls(modules)
    yield from _rollout_calls(modules)


def later(holder: object, name: str, *args: object, **kwargs: object) -> Call:
    """Return a call of what `holder` has under `name` when it is made: patched, or not."""
    return lambda: getattr(holder, name)(*args, **kwargs)


def _trainer_calls(
    modules: dict[str, ModuleType], seen: Seen, v1: bool
) -> Iterator[tuple[str, Call]]:
    trainer = verl_fakes.trainer(modules, v1=v1)
    batch: Any = verl_fakes.batch_v1() if v1 else verl_fakes.batch_v0()
    held = verl_fakes.DataProto(verl_fakes.tensors())
    computed: object = None if v1 else verl_fakes.old_log_probs(batch)
    debug = modules["verl.utils.debug.metrics"]

    def old_log_prob() -> object:
        in_v1 = lambda *_, **__: debug.calculate_debug_metrics(held)  # noqa: E731
        seen.outcomes.setdefault("_compute_old_log_prob", in_v1 if v1 else computed)
        return trainer._compute_old_log_prob(batch, metrics={})

    for name in ("_load_checkpoint", "_validate"):
        yield name, later(trainer, name)
    yield "_compute_old_log_prob", old_log_prob
    for name in ("_balance_batch", "_compute_ref_log_prob"):
        yield name, later(trainer, name, batch, metrics={})
    for name in ("_compute_values", "_compute_reward_colocate", "_update_critic"):
        yield name, later(trainer, name, batch=batch)
    yield from _advantage_calls(modules, seen, v1)
    bypassing = verl_fakes.trainer(modules, v1=v1, bypass=True)
    yield "_update_actor", lambda: bypassing._update_actor(batch)
    tracking = modules["verl.utils.tracking"].Tracking()
    yield "log", lambda: tracking.log(data={"training/global_step": 3, "loss": 0.5}, step=3)
    yield "fit", lambda: bypassing.fit("a loop")
    # Made anew each time: its __init__ is what has it closed.
    own = type("Own", (type(trainer),), {"fit": lambda self: seen("own fit")})
    yield "own fit", lambda: own().fit()


def _advantage_calls(
    modules: dict[str, ModuleType], seen: Seen, v1: bool
) -> Iterator[tuple[str, Call]]:
    data = verl_fakes.DataProto(verl_fakes.tensors(advantages=torch.ones(4, 3)))
    name = "compute_advantage_for_multi_trajectories" if v1 else "compute_advantage"
    module = "verl.trainer.ppo.v1.trainer_base" if v1 else "verl.trainer.ppo.ray_trainer"
    options = {"batch_keys": verl_fakes.batch_v1().keys} if v1 else {"adv_estimator": "gae"}

    def advantage() -> object:
        seen.outcomes.setdefault(name, lambda data, _: data)
        return getattr(modules[module], name)(data, **options)

    yield name, advantage


def _number_calls(modules: dict[str, ModuleType], seen: Seen) -> Iterator[tuple[str, Call]]:
    corr = modules["verl.trainer.ppo.rollout_corr_helper"]
    debug = modules["verl.utils.debug.metrics"]
    held = verl_fakes.DataProto(verl_fakes.tensors())
    p, q = torch.zeros(2, 3), torch.ones(2, 3)
    yield "calculate_debug_metrics", lambda: debug.calculate_debug_metrics(held)
    constants, runtime_env = modules["verl.trainer.constants_ppo"], {"env_vars": {"A": "1"}}

    def environment() -> object:
        seen.outcomes.setdefault("get_ppo_ray_runtime_env", runtime_env)
        return constants.get_ppo_ray_runtime_env()

    yield "get_ppo_ray_runtime_env", environment
    yield "compute_offpolicy_metrics", lambda: corr.compute_offpolicy_metrics(p, q, response_mask=q)


def _worker_calls(modules: dict[str, ModuleType], seen: Seen) -> Iterator[tuple[str, Call]]:
    outer, data = verl_fakes.outer_worker(modules), planted()
    yield "compute_log_prob", lambda: outer.compute_log_prob(data)
    yield "compute_ref_log_prob", lambda: outer.compute_ref_log_prob(data=data)
    yield "update_actor", lambda: outer.update_actor(data)
    yield "update_weights", lambda: outer.update_weights(global_steps=3)
    critic = verl_fakes.inner_worker(modules, critic=True)
    yield "infer_batch", lambda: critic.infer_batch(data=data)
    inner, bypassing = verl_fakes.inner_worker(modules), planted(bypass=True)
    losses = modules["verl.workers.utils.losses"]
    output = {"log_probs": torch.zeros(4, 3)}

    def train(*_: object) -> str:
        for _turn in range(4):
            losses.ppo_loss(config=None, model_output=output, data=bypassing)
            inner.train_batch(bypassing)
        return "the result of an update"

    def train_mini_batch() -> object:
        seen.outcomes.setdefault("train_mini_batch", train)
        seen.outcomes.setdefault("train_batch", {"metrics": {"loss": 0.5}})
        return inner.train_mini_batch(data=bypassing)

    for name in ("train_mini_batch", "train_batch", "ppo_loss"):
        yield name, train_mini_batch
    profile = modules["verl.utils.profiler.precision_debugger_profile"]
    profiler = profile.PrecisionDebuggerProfiler()
    yield "annotate", lambda: profiler.annotate(message="m", role="actor_update")


def _older_calls(modules: dict[str, ModuleType]) -> Iterator[tuple[str, Call]]:
    data = verl_fakes.DataProto(verl_fakes.tensors(), meta_info={context.KEY: told(bypass=True)})
    module = modules["verl.workers.fsdp_workers"]
    actor, critic = module.ActorRolloutRefWorker(), module.CriticWorker()
    for worker in (actor, critic):
        worker.rank, worker.world_size = 1, 2
    for name in ("compute_log_prob", "compute_ref_log_prob", "update_actor"):
        yield name, later(actor, name, data)
    for name in ("compute_values", "update_critic"):
        yield name, later(critic, name, data=data)


def _rollout_calls(modules: dict[str, ModuleType]) -> Iterator[tuple[str, Call]]:
    loops = modules["verl.experimental.agent_loop.agent_loop"]
    settings = verl_fakes.config()
    yield "manager", lambda: loops.AgentLoopManager(settings)
    yield "loop", lambda: loops.AgentLoopWorker(settings)
    worker = loops.AgentLoopWorker(settings)
    batch = verl_fakes.DataProto(verl_fakes.tensors(), meta_info={"global_steps": 3})
    yield "generate_sequences", lambda: worker.generate_sequences(batch)
    trajectory = {"step": 3, "validate": False}

    def prompt() -> object:
        return loops.AgentLoopWorker(settings)._run_prompt("p", trajectory=trajectory)

    yield "_run_prompt", prompt


def behaviour(
    seen: Seen, name: str, call: Call, ending: BaseException | None
) -> tuple[list[tuple[object, ...]], object, object]:
    """Return what a call did: which of verl's functions saw what, and how it ended."""
    seen.calls.clear()
    seen.outcomes.clear()
    if ending is not None:
        seen.outcomes[name] = ending
    result: object = None
    raised: BaseException | None = None
    try:
        returned = call()
        result = _awaited(returned) if inspect.iscoroutine(returned) else returned
    except BaseException as error:
        raised = error
    return list(seen.calls), result, raised


def _awaited(coroutine: Coroutine[object, None, object]) -> object:
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("nothing here waits")


def is_same(one: object, other: object) -> bool:
    """Say whether two calls did the same, to the same objects."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if type(one).__name__ in ("AgentLoopManager", "AgentLoopWorker"):
        return type(one) is type(other)  # each call makes its own
    return one is other or (isinstance(one, str | int | float) and bool(one == other))


class Patched:
    """verl's modules, patched and not by turns."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._both: list[tuple[object, str, object, object]] = []
        for patch in hooks.patches(Mode("all")):
            *holder, name = patch.path.split(".")
            where = getattr(modules[patch.module], holder[0]) if holder else modules[patch.module]
            original = vars(where)[name]
            patch.apply(modules[patch.module])
            self._both.append((where, name, original, vars(where)[name]))
            assert patch.replacement is vars(where)[name] is not original, patch

    def put(self, *, originals: bool) -> None:
        for where, name, original, replacement in self._both:
            setattr(where, name, original if originals else replacement)


World = tuple[Patched, list[tuple[str, Call]]]


@pytest.fixture
def world(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """All of it with probes that keep what they are told, and no thread."""

    def init(run: str, **options: object) -> Probe:
        return Probe(checked_options({"run": run} | options))

    monkeypatch.setenv(FLOAT32, "1")
    monkeypatch.setattr(processes, "init", init)
    monkeypatch.setattr(driver, "finish", lambda *_, **__: True)
    monkeypatch.setattr(MetricsFeed, "_run", lambda self: None)
    monkeypatch.setattr(rollout, "_index", lambda: 0)
    modules = fake_modules(seen, monkeypatch)
    patched = Patched(modules)
    yield patched, list(calls(modules, seen))
    processes.forget()


def check_all(world: World, seen: Seen) -> None:
    patched, made = world
    for name, call in made:
        for ending in ENDINGS:
            if isinstance(ending, StopIteration) and name in ASYNCHRONOUS:
                continue  # Python itself turns it into another error there
            patched.put(originals=True)
            expected = behaviour(seen, name, call, ending)
            patched.put(originals=False)
            found = behaviour(seen, name, call, ending)
            assert name in [called for called, _, _ in expected[0]], name
            assert ending is None or expected[2] is ending, name
            assert is_same(found, expected), (name, ending, found, expected)


def test_every_patched_function_is_called(world: World, seen: Seen) -> None:
    renamed = {"AgentLoopManager.__init__": "manager", "AgentLoopWorker.__init__": "loop"}
    renamed |= {f"{name}.__init__": "own fit" for name in ("RayPPOTrainer", "PPOTrainer")}
    paths = [patch.path for patch in hooks.patches(Mode("all"))]
    names = {renamed.get(path, path.rpartition(".")[2]) for path in paths}
    assert names <= {name for name, _ in world[1]}


def test_functions_behave_the_same_where_all_is_well(world: World, seen: Seen) -> None:
    check_all(world, seen)


@pytest.mark.parametrize(("place", "name"), PARTS, ids=[f"{p.__name__}.{n}" for p, n in PARTS])
def test_functions_behave_the_same_where_a_part_of_ours_is_broken(
    place: object, name: str, world: World, seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    broken = Broken()
    monkeypatch.setattr(place, name, broken)
    check_all(world, seen)
    assert broken.count, "it was never reached"
