"""AReaL's ranks: stages, streams and samples of the processes that hold a trained model.

They are the same under the controllers v1 and v2, which call the same `PPOActor` in their workers,
and without a controller (torchrun). A worker does not learn the step. Its weights' version is the
step: the trainer sets it to step + 1 after each update. A reference has no version, and uses the
version of the model that is trained in its process. Alone in a process it knows no step, and the
trainer's process reports its time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stagescope_workers.integrations import training, weights
from stagescope_workers.integrations.areal import rows
from stagescope_workers.integrations.configuration import lookup, named_run
from stagescope_workers.integrations.patches import (
    Function,
    Wrap,
    after,
    ending,
    guarded,
    running,
    wrapper,
)
from stagescope_workers.integrations.training import ClipBounds, MicrobatchBuffer, alive, clipped
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    from torch import Tensor

    from stagescope_workers.canary.after_syncs import WeightCanary

_DYNAMIC: Final = ("loglinear",)
"""Methods whose proximal log-probs are approximated, so their clipping is not known here."""
_EXPERTS: Final = ("num_experts_per_tok", "moe_topk", "moe_k")
"""Names in a model's configuration: experts of a token."""
_OTHER_LOSSES: Final = ("use_sapo_loss", "use_cispo_loss")


Owner: TypeAlias = Any
"""Attributes read from a `PPOActor` or a `PPOCritic`: its engine (get_version), and its config's
use_decoupled_loss and recompute_logprob."""


class Rank:
    """Reports one `PPOActor` or `PPOCritic` of this process; its calls come one by one."""

    def __init__(self, owner: Owner, role: str) -> None:
        self._owner = weakref.ref(owner)
        self.role = role
        self._probe: Probe | None = None
        self.open: Stage | None = None
        """The stage that runs, for data that arrives during it."""
        self.update: Update | None = None
        self.streams_of: int | None = None
        """The step whose streams were recorded before its update."""
        self.canary: WeightCanary | None = None

    @property
    def owner(self) -> Owner:
        """The PPOActor or PPOCritic."""
        return alive(self._owner)

    @property
    def step(self) -> int | None:
        """The step that runs; None where this process does not know it."""
        if self.role in ("actor", "critic"):
            return int(self.owner.engine.get_version())
        trained = next((each for each in ranks() if each.role == "actor"), None)
        return None if trained is None else trained.step

    @property
    def model(self) -> object:
        """The module that runs, or Megatron's chunks, for captures."""
        return getattr(self.owner.engine, "model", None)

    @property
    def probe(self) -> Probe:
        """The probe of this role, made at its first stage."""
        if self._probe is None:
            step = self.step or 0
            rank, world_size = place()
            self._probe = init(
                run_name(self.owner.config),
                role=self.role,
                rank=rank,
                world_size=world_size,
                resumed_from_step=step - 1 if step else None,
                settings=statistics_settings(self.owner.config) if self.role == "actor" else None,
                **describe(self.owner.engine),
            )
        return self._probe

    @property
    def last_step(self) -> int | None:
        """The step that this process reports; None before the first."""
        return None if self._probe is None else self.step

    def stage(self, name: str, **part: int) -> Stage | None:
        """Return a stage of the step that runs; None where the step is not known."""
        step = self.step
        if step is None:
            return None
        version = part.pop("policy_version", step)
        return self.probe.stage(name, step=step, policy_version=version, model=self.model, **part)

    def samples(self, count: int) -> dict[str, object]:
        """Return ids of the rows of this rank's batch; ranks that hold the same rows agree."""
        group = int(getattr(self.owner.engine, "data_parallel_rank", None) or 0)
        return {"sample_ids": [f"{group}-{row}" for row in range(count)]}

    def routes(self, data: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the engine's routes of a batch, see `rows.routes`; {} without."""
        if "routed_experts" not in data:
            return {}
        engine = self.owner.engine
        config = getattr(engine, "model_config", None) or getattr(engine, "hf_config", None)
        config = getattr(config, "text_config", None) or config
        experts = next((getattr(config, n) for n in _EXPERTS if hasattr(config, n)), None)
        return {**rows.routes(data["routed_experts"], data["loss_mask"], experts)}

    def streams(self) -> dict[str, object]:
        """Return who computes the streams: the engine's rollout, this trainer's passes."""
        engine = type(self.owner.engine).__name__
        own = {"producer": "trainer", "engine": engine}
        temperature = getattr(self.owner.config, "temperature", None)
        if temperature is not None:
            own["temperature"] = temperature
        return {"streams": {"rollout": {"producer": "rollout"}, "old": own, "current": own}}


_ranks: Final[weakref.WeakKeyDictionary[Owner, Rank]] = weakref.WeakKeyDictionary()


def ranks() -> list[Rank]:
    """Return the ranks of this process."""
    return list(_ranks.values())


def rank_of(owner: Owner) -> Rank:
    """Return the rank of a PPOActor or PPOCritic; one without an optimizer is a reference."""
    found = _ranks.get(owner)
    if found is None:
        is_critic = not hasattr(owner, "compute_advantages")
        is_trained = getattr(owner.config, "optimizer", None) is not None
        role = "critic" if is_critic else "actor" if is_trained else "ref"
        found = _ranks[owner] = Rank(owner, role)
    return found


def run_name(config: object) -> str:
    """Return the run of a configuration: experiment and trial, as AReaL names its own logs."""
    parts = [getattr(config, name, None) for name in ("experiment_name", "trial_name")]
    return named_run("-".join(str(part) for part in parts if part), fallback="areal")


def statistics_settings(actor: object) -> dict[str, object]:
    """Return the settings that the statistics depend on: which importance weights are applied.

    Args:
        actor: The configuration of the actor. Tokens are weighed only where its loss is decoupled
            and rejects samples.
    """
    if not weights.has(actor, "rejection_sampling"):
        return weights.not_known("AReaL", "actor.rejection_sampling")
    rejection = lookup(actor, "rejection_sampling")
    if rejection is None or not lookup(actor, "use_decoupled_loss"):
        return {}
    level, metric, action = (lookup(rejection, each) for each in ("level", "metric", "action"))
    if (level, metric) != ("token", "ratio") or action not in ("mask", "clamp"):
        return weights.not_computed(
            "AReaL", f"its rejection_sampling is {action} by {metric} of each {level}"
        )
    bounds = {"low": lookup(rejection, "lower"), "high": lookup(rejection, "upper")}
    return weights.applied("AReaL", "token", "cut" if action == "clamp" else "zero", **bounds)


def place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks of its model."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def describe(engine: object) -> dict[str, Any]:
    """Return an engine's layout and data_rank for `init`, without those that it lacks."""
    layout: dict[str, object] = {
        "framework": "areal", "engine": type(engine).__name__, **training.megatron_layout()
    }  # fmt: skip
    described: dict[str, object] = {"layout": layout}
    for ours, theirs in (
        ("dp_rank", "data_parallel_rank"),
        ("dp_size", "data_parallel_world_size"),
    ):
        with contextlib.suppress(Exception):
            layout[ours] = int(getattr(engine, theirs))
    # Ranks of one data-parallel group are given the same rows, and gather what they computed.
    if "dp_rank" in layout:
        described["data_rank"] = layout["dp_rank"]
    return described


# --- the stages of a PPOActor and a PPOCritic -------------------------------------------------


@after("a rank")
def wrap_init(result: None, owner: Owner, *args: object, **kwargs: object) -> None:
    """Wrap `__init__`: the process knows from the start which of its models is trained."""
    rank_of(owner)


def in_stage(names: Mapping[str, str]) -> Wrap:
    """Return a wrapper that runs a method as a stage, whose name depends on the role."""

    @wrapper
    def wrap(function: Function, owner: Owner, *args: Any, **kwargs: Any) -> object:
        stage: Stage | None = None
        with guarded("a stage of a rank"):
            rank = rank_of(owner)
            if rank.role in names:
                stage = rank.stage(names[rank.role])
        with running(stage), _opened(owner, stage):
            return function(owner, *args, **kwargs)

    return wrap


@contextlib.contextmanager
def _opened(owner: Owner, stage: Stage | None) -> Iterator[None]:
    with guarded("a stage of a rank"):
        rank_of(owner).open = stage
    try:
        yield
    finally:
        with guarded("a stage of a rank"):
            rank_of(owner).open = None


@wrapper
def wrap_forward(
    function: Function, owner: Owner, data: Mapping[str, Tensor], *args: Any, **kwargs: Any
) -> object:
    """Wrap `PPOActor._compute_logp`: the trained model's result is the trainer's stream.

    Its batch has the engine's stream still, which `compute_advantages` may overwrite. Routes are
    read before it: a pass that replays them takes them out of the batch.
    """
    routes: dict[str, Any] = {}
    with guarded("the routes before the update"):
        routes = rank_of(owner).routes(data)
    result: Any = function(owner, data, *args, **kwargs)
    with guarded("the streams before the update"):
        rank = rank_of(owner)
        if rank.role == "actor" and rank.open is not None and result is not None:
            _record_streams(rank, rank.open, data, result, routes)
    return result


@wrapper
def wrap_advantages(
    function: Function, owner: Owner, data: Mapping[str, Tensor], *args: Any, **kwargs: Any
) -> object:
    """Wrap `PPOActor._compute_advantages`: records rewards and advantages, aligned.

    Log-probs that came with the batch (another process computed them) are recorded before it, since
    it overwrites the engine's with them where the loss is not decoupled.
    """
    with guarded("the streams before the update"):
        rank = rank_of(owner)
        given = data.get("prox_logp")
        if given is not None and rank.streams_of != rank.step:
            stage = rank.stage("actor_compute_log_prob")
            with running(stage):
                if stage is not None:
                    routes = rank.routes(data)
                    _record_streams(rank, stage, data, given, routes)
    result = function(owner, data, *args, **kwargs)
    with guarded("advantages"):
        stage = rank_of(owner).open
        if stage is not None:
            made = rows.after_advantages(result)
            samples = rank_of(owner).samples(made["response_mask"].shape[0])
            stage.record({**made, **samples})
    return result


def _record_streams(
    rank: Rank,
    stage: Stage,
    data: Mapping[str, Tensor],
    trainer: Tensor,
    routes: Mapping[str, object],
) -> None:
    recorded: dict[str, Any] = {**rows.before_update(data, trainer), **routes}
    samples = rank.samples(recorded["response_mask"].shape[0])
    stage.record({**recorded, **samples, **rank.streams()})
    rank.streams_of = rank.step


# --- the update -------------------------------------------------------------------------------


class Update:
    """The parts of one `ppo_update`: one for each mini-batch, which ends with its optimizer step.

    Args:
        rank: The rank that updates its model.
        records_streams: Whether only the loss has both streams.
    """

    def __init__(self, rank: Rank, *, records_streams: bool) -> None:
        self._rank = rank
        self._records_streams = records_streams
        self._buffer = MicrobatchBuffer()
        self._stage: Stage | None = None
        self._done = 0
        self._refused: dict[str, object] = {}
        """Why the routes of the micro-batches are missing."""
        self.begin()

    def begin(self) -> None:
        """Begin the part of the next mini-batch, unless it is open."""
        if self._stage is None:
            self._stage = self._rank.stage("actor_update", minibatch=self._done)
            if self._stage is not None:
                self._stage.begin()

    def end(self, error: BaseException | None = None) -> None:
        """End the part that is open, with what its micro-batches had."""
        stage, self._stage = self._stage, None
        payload = self._buffer.pop_all()
        if stage is None:
            return
        if payload:
            stage.record({**payload, **self._refused, **self._rank.streams()})
        stage.end(error)
        self._done += 1

    def add(
        self,
        logprobs: Tensor,
        entropy: Tensor | None,
        data: Mapping[str, Tensor],
        options: Mapping[str, object],
    ) -> None:
        """Add a micro-batch of the loss; all that it is given is of the next token."""
        self.begin()
        shifted: dict[str, Tensor | None] = {
            "response_mask": data["loss_mask"].bool(),
            "log_probs": logprobs,
            "advantages": data["advantages"],
            "entropy": entropy,
            **({"rollout_log_probs": data["logprobs"]} if self._records_streams else {}),
        }
        cut = _clipped(logprobs.detach(), data, options)
        if cut is not None:
            shifted["clipped"] = cut
        present = {name: each for name, each in shifted.items() if each is not None}
        part, lengths = rows.of_loss(data, present)
        if self._records_streams:
            found = self._rank.routes(data)
            routes = found.pop(rows.ROUTES, None)
            self._refused |= found
            if routes is not None:
                part[rows.ROUTES] = routes.reshape(-1, *routes.shape[-2:])
        self._buffer.add(part, lengths)


def _clipped(
    logprobs: Tensor, data: Mapping[str, Tensor], options: Mapping[str, Any]
) -> Tensor | None:
    """Return -1 or 1 where the loss is constant in a token's ratio, else 0; None: not known here.

    Args:
        logprobs: Log-probs of the update's own pass.
        data, options: The loss's `input_data`, and its keyword arguments.
    """
    proximal, low = data.get("prox_logp"), options.get("eps_clip")
    method = str(options.get("prox_logp_method", ""))
    if proximal is None or low is None or any(options.get(name) for name in _OTHER_LOSSES):
        return None
    if options.get("importance_sampling_level", "token") != "token" or method in _DYNAMIC:
        return None
    higher, dual = options.get("eps_clip_higher"), options.get("c_clip")
    bounds = ClipBounds(1 - low, 1 + (low if higher is None else higher), dual)
    found: Tensor = clipped(logprobs - proximal, data["advantages"], bounds)
    return found


@wrapper
def wrap_update(function: Function, owner: Owner, *args: Any, **kwargs: Any) -> object:
    """Wrap `PPOActor.ppo_update`: its parts are `actor_update`."""
    rank: Rank | None = None
    with guarded("actor_update"):
        rank = rank_of(owner)
        config = owner.config
        is_overwritten = not config.use_decoupled_loss and config.recompute_logprob
        has_both = rank.streams_of == rank.step or is_overwritten
        rank.update = Update(rank, records_streams=not has_both)
    with ending("the end of actor_update", functools.partial(_end_update, rank)):
        return function(owner, *args, **kwargs)


def _end_update(rank: Rank | None, error: BaseException | None) -> None:
    update = None if rank is None else rank.update
    if rank is not None and update is not None:
        rank.update = None
        update.end(error)


@after("the tokens of the loss")
def wrap_loss(
    result: object,
    logprobs: Tensor,
    entropy: Tensor | None,
    input_data: Mapping[str, Tensor],
    *args: object,
    **kwargs: object,
) -> None:
    """Wrap `grpo_loss_fn`, which has the trainer's log-probs of now and the engine's."""
    update = next((each.update for each in ranks() if each.update is not None), None)
    if update is not None:
        update.add(logprobs, entropy, input_data, kwargs)


def end_minibatch() -> None:
    """End the part of the mini-batch whose optimizer step was made."""
    for rank in ranks():
        if rank.update is not None:
            rank.update.end()


def weight_sync() -> Stage | None:
    """Return the stage of a rank that sends its weights, once it has trained a step."""
    actor = next((each for each in ranks() if each.role == "actor"), None)
    step = None if actor is None else actor.last_step
    if step is None or actor is None:
        return None
    return actor.stage("weight_sync", policy_version=step + 1)
