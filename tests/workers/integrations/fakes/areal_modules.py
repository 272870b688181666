"""AReaL's modules with the functions that the integration touches, without AReaL.

Only their interface is AReaL's (contracts/areal.json): names, arguments, the columns of a batch,
and which of them are rolled where. `write` makes a package to import, so that the import hook is
what patches it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

PERF_TRACER: Final = """
import contextlib, functools

entered = []


@contextlib.contextmanager
def _scope(name):
    entered.append(name)
    yield name


def trace_scope(name, *, category=None, enable_profiler=False, profiler_args=None, args=None):
    return _scope(name)


def trace_perf(name, *, category=None):
    def decorator(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            with trace_scope(name, category=category):
                return function(*args, **kwargs)
        return run
    return decorator
"""

STATS_LOGGER: Final = """
class StatsLogger:
    def __init__(self):
        self.logged = []

    def commit(self, epoch, step, global_step, data):
        self.logged.append((global_step, data))
"""

ENGINE: Final = '''
import torch
from areal.utils.perf_tracer import trace_scope


def packed(batch):
    """[rows, tokens, ...] -> [tokens, ...] without padding."""
    keep = batch["attention_mask"].bool()
    lengths = keep.sum(1)
    result = {
        name: value[keep] if value.shape[:2] == keep.shape else value
        for name, value in batch.items() if name != "attention_mask"
    }
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    return {**result, "cu_seqlens": ends}


class FSDPEngine:
    """A model with one parameter, whose log-prob of token t + 1 stands at t."""
    data_parallel_rank, data_parallel_world_size = 0, 1

    def __init__(self):
        self._version, self.drift, self.seen = 0, 0.0, []

    def get_version(self): return self._version
    def set_version(self, version): self._version = version
    def eval(self): pass
    def train(self): pass

    def log_probs(self, ids):
        return (-0.1 - 0.01 * ids.roll(-1, -1) + self.drift).float()

    def forward(self, input_, aggregate_fn=None):
        return self.log_probs(input_["input_ids"])

    def train_batch(self, batch, loss_fn, loss_weight_fn):
        for rows in batch["input_ids"].shape[0] * [None] and [slice(0, 1), slice(1, None)]:
            one = {name: value[rows] for name, value in batch.items()}
            if not one["input_ids"].shape[0]:
                continue
            one = packed(one)
            ends = one["cu_seqlens"].tolist()
            log_probs = torch.cat([
                self.log_probs(one["input_ids"][a:b]) for a, b in zip(ends, ends[1:])
            ]).requires_grad_()
            self.seen.append((self._version, log_probs.detach().clone(), one))
            loss_fn(log_probs, torch.ones_like(log_probs), one).backward()
        with trace_scope("fsdp_engine.step"):
            self.drift += 0.125
        return {"grad_norm": 1.0}

    def update_weights(self):
        with trace_scope("fsdp_engine.update_weights_from_distributed"):
            pass
'''

ACTOR: Final = """
import functools
import torch
from areal.utils.perf_tracer import trace_perf


def batched_call(function, data, unpack=True):
    batch = {name: torch.cat([each[name] for each in data]) for name in data[0]}
    result = function(batch)
    if not unpack:
        return None
    if isinstance(result, dict):
        return [{n: v[i:i + 1] for n, v in result.items()} for i in range(len(data))]
    return [result[i:i + 1] for i in range(len(data))]


class PPOActor:
    def __init__(self, config, engine):
        self.config, self.engine = config, engine

    @trace_perf("ppo_actor.compute_logp", category="compute")
    def compute_logp(self, data):
        return batched_call(self._compute_logp, data)

    def _compute_logp(self, data):
        return self.engine.forward(input_=data, aggregate_fn=None)

    @trace_perf("ppo_actor.compute_advantages", category="compute")
    def compute_advantages(self, data):
        return batched_call(self._compute_advantages, data)

    def _compute_advantages(self, data):
        mask = data["loss_mask"].float().roll(-1, -1)
        if not self.config.use_decoupled_loss and self.config.recompute_logprob:
            old = data["prox_logp"].clone()
        else:
            old = data["logprobs"].roll(-1, -1)
            if not self.config.use_decoupled_loss:
                data["prox_logp"] = old
        old *= mask
        data["logprobs"], data["loss_mask"] = old, mask
        data["advantages"] = (data["rewards"][:, None] - 0.5) * mask
        data["returns"] = data["advantages"]
        return data

    @trace_perf("ppo_actor.ppo_update", category="compute")
    def ppo_update(self, data):
        batched_call(self._ppo_update, data, unpack=False)

    def _ppo_update(self, data):
        data = {name: value for name, value in data.items() if name != "rewards"}
        half = data["input_ids"].shape[0] // 2
        for rows in (slice(0, half), slice(half, None)):
            self.engine.train_batch(
                {name: value[rows] for name, value in data.items()},
                loss_fn=functools.partial(
                    grpo_loss_fn, eps_clip=0.2, eps_clip_higher=None, c_clip=None,
                    prox_logp_method=self.config.prox_logp_method,
                    use_decoupled_loss=self.config.use_decoupled_loss,
                ),
                loss_weight_fn=None,
            )


class PPOActorController:
    def __init__(self, actor):
        self.actor = actor

    def compute_logp(self, *args, **kwargs):
        return self.actor.compute_logp(*args, **kwargs)

    def compute_advantages(self, *args, **kwargs):
        return self.actor.compute_advantages(*args, **kwargs)

    def ppo_update(self, *args, **kwargs):
        self.actor.ppo_update(*args, **kwargs)


class PPOActorControllerV2(PPOActorController):
    def compute_advantages(self, *args, **kwargs):
        return self.actor.compute_advantages(*args, **kwargs)


def grpo_loss_fn(
    logprobs, entropy, input_data, eps_clip, eps_clip_higher, c_clip, rejection_sampling=None,
    m2_threshold=None, importance_sampling_level="token", current_version=None,
    prox_logp_method="recompute", use_sapo_loss=False, sapo_tau_pos=1.0, sapo_tau_neg=1.05,
    use_decoupled_loss=False, vocab_min_logits=None, vocab_max_logits=None,
):
    return (logprobs * input_data["advantages"] * input_data["loss_mask"]).sum()
"""

CRITIC: Final = """
class PPOCritic:
    def __init__(self, config, engine):
        self.config, self.engine = config, engine

    def compute_values(self, data):
        return [each["input_ids"].float() for each in data]

    def ppo_update(self, data):
        pass
"""

TRAINER: Final = '''
from areal.utils import perf_tracer
from areal.utils.stats_logger import StatsLogger


class PPOTrainer:
    """The order of AReaL's loop, with one controller."""

    def __init__(self, config, train_dataset=None, valid_dataset=None):
        self.config, self.stats_logger, self.recover_info = config, StatsLogger(), None
        self.actor = self.ref = None

    def train(
        self, workflow=None, eval_workflow=None, workflow_kwargs=None, eval_workflow_kwargs=None,
        dynamic_filter_fn=None, total_epochs=None,
    ):
        actor, engine = self.actor, self.actor.actor.engine
        for step in range(self.config.first_step, self.config.total_train_steps):
            def scope(name):
                return perf_tracer.trace_scope(f"train.{name}", args={"global_step": step})

            with scope("rollout"):
                batch = workflow(step)
            if self.ref is not None:
                with scope("ref_logp"):
                    for each, values in zip(batch, self.ref.compute_logp(batch)):
                        each["ref_logp"] = values
            if self.config.recompute_logprob or self.config.use_decoupled_loss and (
                self.config.prox_logp_method == "recompute"
            ):
                with scope("recompute_logp"):
                    for each, values in zip(batch, actor.compute_logp(batch)):
                        each["prox_logp"] = values
            with scope("compute_advantage"):
                batch = actor.compute_advantages(batch)
            with scope("ppo_update"):
                actor.ppo_update(batch)
            with scope("update_weights"):
                engine.update_weights()
                engine.set_version(step + 1)
            with scope("log_stats"):
                self.stats_logger.commit(0, step, step, {"ppo_actor/task_reward/avg": step + 0.5,
                                                         "n__count": 7})
'''

FILES: Final = {
    "areal/__init__.py": "__version__ = 'fake'\n",
    "areal/utils/__init__.py": "",
    "areal/utils/perf_tracer.py": PERF_TRACER,
    "areal/utils/stats_logger.py": STATS_LOGGER,
    "areal/engine/__init__.py": "",
    "areal/engine/fsdp_engine.py": ENGINE,
    "areal/trainer/__init__.py": "",
    "areal/trainer/rl_trainer.py": TRAINER,
    "areal/trainer/ppo/__init__.py": "",
    "areal/trainer/ppo/actor.py": ACTOR,
    "areal/trainer/ppo/critic.py": CRITIC,
}


def write(folder: Path) -> None:
    """Write the package into `folder`."""
    for name, source in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
