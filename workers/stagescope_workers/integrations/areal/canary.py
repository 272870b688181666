"""A canary after each of AReaL's weight syncs: its trainer asks the servers, its ranks score.

A rank scores where it has entered `update_weights` and sent nothing yet. There it has the weights
of the sync on the device, and every rank comes there. Ranks score by AReaL's own
`PPOActor._compute_logp`, the pass that `recompute_logprob` makes, with each sequence in a
micro-batch of its own: packed rows may attend to each other. First they agree that all of them can,
so that none waits in a pass for a rank that makes none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stagescope_workers.canary.after_syncs import WeightCanary
from stagescope_workers.canary.sequences import Sequences, of_tokenizer
from stagescope_workers.integrations import canary
from stagescope_workers.integrations.areal import ranks
from stagescope_workers.integrations.configuration import lookup
from stagescope_workers.integrations.patches import guarded, log_once
from stagescope_workers.probe.probe import Probe

_ACTIVITY = "the canary"


def of_servers(trainer: Any, probe: Probe) -> WeightCanary | None:
    """Return the canary that asks the rollout's servers; None where there is none to ask."""
    every, urls = canary.every(), _servers(trainer.rollout)
    if every is None:
        return None
    if reason := _reason_against(trainer, urls):
        log_once(f"AReaL: {canary.VARIABLE} asks no server: {reason}")
        return None
    return probe.canary(
        engine=urls,
        sequences=_sequences(trainer.tokenizer, lookup(trainer.config, "actor")),
        tokenizer=trainer.tokenizer,
        temperature=float(lookup(trainer.config, "gconfig", "temperature") or 1.0),
        every=every,
    )


def ask(found: WeightCanary, config: Any, step: int) -> None:
    """Ask the servers, which have the weights that `step` made."""
    version = step + 1
    adapter = None
    if lookup(config, "actor", "use_lora"):
        adapter = f"{lookup(config, 'gconfig', 'lora_name')}-v{version}"
    found.after_sync(version, step, adapter=adapter)


def score() -> None:
    """Score with the trained model of this process; all ranks call it at the same place."""
    rank = next((each for each in ranks.ranks() if each.role == "actor"), None)
    if canary.every() is None or rank is None:
        return
    found: WeightCanary | None = None
    with guarded(_ACTIVITY):
        found = _of_rank(rank)
    with guarded(_ACTIVITY):
        step = rank.last_step
        can = _all_can(rank, found is not None and step is not None)
        if can and found is not None and step is not None:
            found.score(step + 1, lambda rows: _log_probs(rank.owner, rows), step)


def _of_rank(rank: ranks.Rank) -> WeightCanary | None:
    every = canary.every()
    if rank.canary is None and rank.last_step is not None and every is not None:
        sequences = _sequences(rank.owner.engine.tokenizer, rank.owner.config)
        rank.canary = rank.probe.canary(sequences=sequences, every=every)
    return rank.canary


def _sequences(tokenizer: Any, actor: object) -> Sequences:
    """Return the sequences, which fit into a micro-batch; the same in the trainer and in a rank."""
    return of_tokenizer(tokenizer, max_length=lookup(actor, "mb_spec", "max_tokens_per_mb"))


def _servers(rollout: Any) -> list[str]:
    """Return the addresses of the rollout's servers, with a controller and without one."""
    infos = getattr(rollout, "server_infos", None)
    if infos is None:
        return [f"http://{each}" for each in rollout._engine.addresses]
    hosts = [(f"[{each.host}]" if ":" in each.host else each.host, each.port) for each in infos]
    return [f"http://{host}:{port}" for host, port in hosts]


def _reason_against(trainer: Any, urls: Sequence[str]) -> str:
    if getattr(trainer, "_should_offload_rollout", False):
        return "they share their devices with the trainer, and sleep after the sync"
    return "" if urls else "the rollout names none"


def _all_can(rank: ranks.Rank, can: bool) -> bool:
    """Return whether every rank of the model can score; waits for them, as the sync does next."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return can
    votes = torch.tensor(int(can))
    dist.all_reduce(votes, dist.ReduceOp.MIN, group=rank.owner.engine.cpu_group)
    return bool(votes)


def _log_probs(owner: ranks.Owner, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """Score rows at temperature 1 by the pass of a `PPOActor`."""
    import torch

    engine = owner.engine
    given = [*rows, *[rows[-1]] * (-len(rows) % _multiple(engine))]
    width = max(map(len, given))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in given])
    lengths = torch.tensor([len(row) for row in given])
    mask = torch.arange(width) < lengths[:, None]
    with _separately(engine, len(given)):
        found = owner._compute_logp({"input_ids": ids, "attention_mask": mask})
    # Index t has the log-prob of token t + 1.
    return [own[: len(row) - 1] for own, row in zip(found.tolist(), rows, strict=False)]


def _multiple(engine: Any) -> int:
    """Return what must divide the number of micro-batches: twice the stages of a pipeline."""
    megatron = getattr(getattr(engine, "parallel_strategy", None), "pipeline_parallel_size", 1)
    stages = max(megatron, getattr(getattr(engine, "parallel_dims", None), "pp", 1))
    return 2 * stages if stages > 1 else 1


@contextmanager
def _separately(engine: Any, count: int) -> Iterator[None]:
    """Give an engine a copy of its configuration: temperature 1, `count` micro-batches."""
    own = engine.config
    engine.config = changed = copy.copy(own)
    changed.temperature, changed.mb_spec = 1.0, copy.copy(own.mb_spec)
    changed.mb_spec.n_mbs, changed.mb_spec.granularity, changed.mb_spec.n_mbs_divisor = count, 1, 1
    try:
        yield
    finally:
        engine.config = own
        engine.train()  # as the update left it
