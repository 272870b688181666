"""What of verl the plugin touches, in the shapes of verl's own modules, without verl.

`fake_modules` makes the modules; each of their functions calls `Seen` with what it was given, and
does what the test said in `Seen.outcomes`.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import pytest
import torch
from tensordict import NonTensorData, TensorDict

Method = TypeVar("Method", bound=Callable[..., object])
Modules = dict[str, dict[str, object]]
"""Members of modules by the names of both."""


class Register(Protocol):
    """verl's `register`: makes a decorator of a worker's methods."""

    def __call__(self, **options: object) -> Callable[[Method], Method]: ...


ROWS = 4
WIDTH = 3
STEP = 3

_DECORATOR = """
import functools, inspect

MAGIC_ATTR = "attrs_of_verl"
entered = []


def register(dispatch_mode="all", execute_mode="all", blocking=True, materialize_futures=True):
    def decorator(method):
        @functools.wraps(method)
        def inner(*args, **kwargs):
            entered.append(method.__name__)
            return method(*args, **kwargs)

        @functools.wraps(method)
        async def async_inner(*args, **kwargs):
            entered.append(method.__name__)
            return await method(*args, **kwargs)

        made = async_inner if inspect.iscoroutinefunction(method) else inner
        attributes = dict(dispatch_mode=dispatch_mode, execute_mode=execute_mode, blocking=blocking)
        setattr(made, MAGIC_ATTR, attributes)
        return made

    return decorator
"""


def no_padding_2_padding(tensor: torch.Tensor, data: object) -> torch.Tensor:
    """Return the rows of a model's output side by side, as verl does; here it has no prompts."""
    return torch.nested.to_padded_tensor(tensor, 0.0) if tensor.is_nested else tensor


class Seen:
    """What verl's own functions were called with, and what they do then."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, object]]] = []
        self.outcomes: dict[str, object] = {}

    def __call__(self, name: str, *args: object, **kwargs: object) -> object:
        self.calls.append((name, args, kwargs))
        outcome = self.outcomes.get(name, f"the result of {name}")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome(*args, **kwargs) if callable(outcome) else outcome

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


@dataclasses.dataclass
class DataProto:
    """A batch of the trainers before V1."""

    batch: TensorDict
    non_tensor_batch: dict[str, Any] = dataclasses.field(default_factory=dict)
    meta_info: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.batch.batch_size[0])


@dataclasses.dataclass
class KVBatchMeta:
    """A batch of V1: keys and tags of samples that lie elsewhere."""

    keys: list[str]
    tags: list[dict[str, object]]
    extra_info: dict[str, object] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)


def tensors(**more: object) -> TensorDict:
    """Return a TensorDict with both streams, mask and responses of ROWS x WIDTH."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(ROWS, WIDTH, generator=generator)
    held = {
        "rollout_log_probs": rollout,
        "old_log_probs": rollout - 0.01,
        "response_mask": torch.tensor([[1, 1, 0]] * ROWS),
        "responses": torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH),
    }
    return TensorDict(held | more, batch_size=[ROWS])


def with_notes(data: Any, **notes: object) -> object:
    """Put what is no tensor into a worker's TensorDict, as verl does."""
    for name, value in notes.items():
        data[name] = NonTensorData(value)
    return data


def fake_modules(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """Put verl's modules in place for one test; returns them by name."""
    decorator = types.ModuleType("verl.single_controller.base.decorator")
    path = "/nowhere/verl/single_controller/base/decorator.py"
    exec(compile(_DECORATOR, path, "exec"), vars(decorator))
    padding = types.ModuleType("verl.workers.utils.padding")
    vars(padding)["no_padding_2_padding"] = no_padding_2_padding
    made = {module.__name__: module for module in (decorator, padding)}
    for add in (_trainers, _numbers, _workers, _older_workers, _rollout):
        for name, members in add(seen, decorator.register).items():
            module = made.setdefault(name, types.ModuleType(name))
            for member, value in members.items():
                setattr(module, member, value)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def _trainers(seen: Seen, register: Register) -> Modules:
    def with_batch(name: str) -> object:
        def method(self: object, batch: object, metrics: object = None) -> object:
            return seen(name, self, batch, metrics=metrics)

        return method

    def alone(name: str) -> object:
        def method(self: object, *args: object) -> object:
            return seen(name, self, *args)

        return method

    batched = (
        "_balance_batch", "_compute_old_log_prob", "_compute_ref_log_prob", "_compute_values",
        "_compute_reward_colocate", "_update_critic", "_update_actor",
    )  # fmt: skip
    members: dict[str, object] = {name: with_batch(name) for name in batched}
    members["__init__"] = lambda self: None
    members |= {name: alone(name) for name in ("_load_checkpoint", "_validate", "fit")}
    return {
        "verl.trainer.ppo.ray_trainer": {"RayPPOTrainer": type("RayPPOTrainer", (), {**members})},
        "verl.trainer.ppo.v1.trainer_base": {"PPOTrainer": type("PPOTrainer", (), {**members})},
    }


def _numbers(seen: Seen, register: Register) -> Modules:
    def calculate_debug_metrics(data: object) -> object:
        return seen("calculate_debug_metrics", data)

    def compute_advantage(data: object, adv_estimator: str) -> object:
        return seen("compute_advantage", data, adv_estimator)

    def compute_advantage_for_multi_trajectories(data: object, batch_keys: object) -> object:
        return seen("compute_advantage_for_multi_trajectories", data, batch_keys)

    def compute_offpolicy_metrics(
        old_log_prob: object, rollout_log_prob: object, response_mask: object
    ) -> object:
        return seen("compute_offpolicy_metrics", old_log_prob, rollout_log_prob, response_mask)

    def ppo_loss(
        config: object, model_output: object, data: object, dp_group: object = None
    ) -> object:
        return seen("ppo_loss", config, model_output, data, dp_group)

    def get_ppo_ray_runtime_env() -> object:
        return seen("get_ppo_ray_runtime_env")

    class Tracking:
        def log(self, data: object, step: int, backend: object = None) -> object:
            return seen("log", self, data, step, backend)

    v1 = compute_advantage_for_multi_trajectories
    return {
        "verl.trainer.constants_ppo": {"get_ppo_ray_runtime_env": get_ppo_ray_runtime_env},
        "verl.utils.debug.metrics": {"calculate_debug_metrics": calculate_debug_metrics},
        "verl.trainer.ppo.ray_trainer": {"compute_advantage": compute_advantage},
        "verl.trainer.ppo.v1.trainer_base": {v1.__name__: v1},
        "verl.trainer.ppo.rollout_corr_helper": {
            "compute_offpolicy_metrics": compute_offpolicy_metrics
        },
        "verl.workers.utils.losses": {"ppo_loss": ppo_loss},
        "verl.utils.tracking": {"Tracking": Tracking},
    }


def _workers(seen: Seen, register: Register) -> Modules:
    class ActorRolloutRefWorker:
        @register(dispatch_mode="actor")
        def compute_log_prob(self, data: object) -> object:
            return seen("compute_log_prob", self, data)

        @register(dispatch_mode="ref")
        def compute_ref_log_prob(self, data: object) -> object:
            return seen("compute_ref_log_prob", self, data)

        @register(dispatch_mode="actor")
        def update_actor(self, data: object) -> object:
            return seen("update_actor", self, data)

        @register(blocking=False)
        async def update_weights(self, global_steps: object = None, mode: str = "auto") -> object:
            return seen("update_weights", self, global_steps, mode)

    class TrainingWorker:
        @register()
        def infer_batch(self, data: object) -> object:
            return seen("infer_batch", self, data)

        @register(blocking=False)
        def train_mini_batch(self, data: object) -> object:
            return seen("train_mini_batch", self, data)

        @register(blocking=False)
        def train_batch(self, data: object) -> object:
            return seen("train_batch", self, data)

    class PrecisionDebuggerProfiler:
        def annotate(self, message: object = None, **kwargs: object) -> object:
            return seen("annotate", self, message, **kwargs)

    return {
        "verl.workers.engine_workers": {
            "ActorRolloutRefWorker": ActorRolloutRefWorker,
            "TrainingWorker": TrainingWorker,
        },
        "verl.utils.profiler.precision_debugger_profile": {
            "PrecisionDebuggerProfiler": PrecisionDebuggerProfiler
        },
    }


def _older_workers(seen: Seen, register: Register) -> Modules:
    def method(name: str) -> object:
        @register()
        def method(self: object, data: object) -> object:
            return seen(name, self, data)

        return method

    @register(blocking=False)
    async def update_weights(self: object, global_steps: object = None) -> object:
        return seen("update_weights", self, global_steps)

    actor = ("compute_log_prob", "compute_ref_log_prob", "update_actor")
    critic = ("compute_values", "update_critic")
    kinds: Modules = {
        "ActorRolloutRefWorker": {name: method(name) for name in actor},
        "AsyncActorRolloutRefWorker": {"update_weights": update_weights},
        "CriticWorker": {name: method(name) for name in critic},
    }
    return {
        module: {name: type(name, (), {**members}) for name, members in kinds.items()}
        for module in ("verl.workers.fsdp_workers", "verl.workers.megatron_workers")
    }


def _rollout(seen: Seen, register: Register) -> Modules:
    class AgentLoopManager:
        def __init__(self, config: object) -> None:
            seen("manager", self, config)
            self.config = config

    class AgentLoopWorker:
        def __init__(self, config: object) -> None:
            seen("loop", self, config)
            self.config = config

        async def generate_sequences(self, batch: object) -> object:
            return seen("generate_sequences", self, batch)

        async def _run_prompt(self, prompt: object, trajectory: object = None) -> object:
            outcome = seen("_run_prompt", prompt, trajectory=trajectory)
            return await outcome if inspect.isawaitable(outcome) else outcome

    return {
        "verl.experimental.agent_loop.agent_loop": {
            "AgentLoopManager": AgentLoopManager,
            "AgentLoopWorker": AgentLoopWorker,
        }
    }


def config(**trainer: object) -> dict[str, Any]:
    """Return a configuration in verl's form, as a plain dict."""
    names = {"project_name": "maths", "experiment_name": "first"}
    return {
        "trainer": {**names, **trainer},
        "algorithm": {"rollout_correction": {"bypass_mode": False}},
        "actor_rollout_ref": {
            "rollout": {"name": "vllm", "temperature": 0.7, "agent": {"num_workers": 2}},
            "actor": {"strategy": "fsdp2"},
        },
    }


def trainer(modules: dict[str, types.ModuleType], *, v1: bool = False, bypass: bool = False) -> Any:
    """Return a trainer in the shape of V0 or V1 (synchronous), at STEP."""
    module = "verl.trainer.ppo.v1.trainer_base" if v1 else "verl.trainer.ppo.ray_trainer"
    made = vars(modules[module])["PPOTrainer" if v1 else "RayPPOTrainer"]()
    made.config = config()
    made.config["algorithm"]["rollout_correction"]["bypass_mode"] = bypass
    made.global_steps = STEP
    if v1:
        made.replay_buffer, made.trainer_mode = object(), "sync"
    return made


def batch_v0(**more: object) -> DataProto:
    """Return a DataProto before its log-probs were computed: two groups of two rows."""
    held = tensors(**more)
    del held["old_log_probs"]
    return DataProto(held, {"uid": ["g0", "g0", "g1", "g1"]})


def old_log_probs(batch: DataProto) -> tuple[DataProto, float]:
    """Return what V0's `_compute_old_log_prob` does: the streams, and a utilisation."""
    old = batch.batch["rollout_log_probs"] - 0.01
    return DataProto(TensorDict({"old_log_probs": old}, batch_size=[ROWS])), 0.5


def batch_v1() -> KVBatchMeta:
    """Return a KVBatchMeta of two groups of two rollouts."""
    keys = [f"g{group}_{rollout}_0" for group in (0, 1) for rollout in (0, 1)]
    return KVBatchMeta(keys, [{} for _ in keys])


class Engine:
    """A model engine's answers to what the plugin asks."""

    def __init__(self, *, size: int = 2, rank: int = 1) -> None:
        self.module = torch.nn.Linear(2, 2)
        self.engine_config = types.SimpleNamespace(strategy="fsdp2")
        self._size = size
        self._rank = rank

    def get_data_parallel_size(self) -> int:
        return self._size

    def get_data_parallel_rank(self) -> int:
        return self._rank


def inner_worker(modules: dict[str, types.ModuleType], *, critic: bool = False) -> Any:
    """Return a TrainingWorker of rank 1 of 2."""
    worker = modules["verl.workers.engine_workers"].TrainingWorker()
    worker.engine, worker.rank, worker.world_size = Engine(), 1, 2
    kind = "value_model" if critic else "language_model"
    worker.config = types.SimpleNamespace(model_type=kind)
    return worker


def outer_worker(modules: dict[str, types.ModuleType]) -> Any:
    """Return an ActorRolloutRefWorker of rank 1 of 2."""
    worker = modules["verl.workers.engine_workers"].ActorRolloutRefWorker()
    worker.rank, worker.world_size = 1, 2
    worker.actor, worker.ref = inner_worker(modules), inner_worker(modules)
    return worker
