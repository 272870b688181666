"""A canary after each of verl's weight syncs: its driver asks the servers, its ranks score.

The ranks score by `compute_log_prob`, the call that every step makes on all of them. They do so
immediately before the sync: they have the weights that it sends. The servers still sleep then, so
the trainer has its memory. When the servers are put to sleep, a canary that is not complete is
dropped. Only its current call is awaited, since a sleeping server must have no request.

Read in verl 0.9. In V1's synchronous trainer only the servers are asked: its `compute_log_prob`
takes keys of a transfer queue, in which nothing of ours belongs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from stagescope_workers.canary.after_syncs import WeightCanary
from stagescope_workers.canary.sequences import SCORED, of_tokenizer
from stagescope_workers.integrations import canary
from stagescope_workers.integrations.configuration import lookup
from stagescope_workers.integrations.patches import Function, guarded, log_once
from stagescope_workers.integrations.verl import batches
from stagescope_workers.probe.probe import Probe

_ROLLOUT: Final = ("actor_rollout_ref", "rollout")
_LAST_CALL_SECONDS: Final = 10.0
"""How long the servers' sleep waits for a canary's last call, of eight short requests at most."""


def attach(trainer: Any, probe: Probe) -> None:
    """Have a trainer's servers asked after each of its weight syncs, where that is wanted."""
    manager = getattr(trainer, "checkpoint_manager", None)
    every = canary.every()
    if every is None or manager is None:
        return
    if reason := _reason_against(trainer):
        log_once(f"verl: {canary.VARIABLE} has no effect: {reason}")
        return
    found = probe.canary(
        engine=_servers(trainer),
        sequences=of_tokenizer(trainer.tokenizer, max_length=_max_length(trainer)),
        tokenizer=trainer.tokenizer,
        temperature=float(lookup(trainer.config, *_ROLLOUT, "temperature") or 1.0),
        every=every,
    )
    update = manager.update_weights

    @functools.wraps(update)
    def run(*args: object, **kwargs: object) -> object:
        version = int(trainer.global_steps)
        step = version or None  # whose update made these weights

        def score(each: WeightCanary) -> None:
            if not batches.is_v1(trainer):
                each.score(version, functools.partial(_log_probs, trainer), step)

        with canary.around_sync(
            lambda: found, before=score, after=lambda each: each.after_sync(version, step)
        ):
            return update(*args, **kwargs)

    manager.update_weights = run
    sleep = getattr(manager, "sleep_replicas", None)
    if sleep is not None:
        manager.sleep_replicas = _before(sleep, functools.partial(_drop, found))


def _before(function: Function, act: Callable[[], None]) -> Function:
    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        with guarded("the canary"):
            act()
        return function(*args, **kwargs)

    return run


def _drop(found: WeightCanary) -> None:
    found.before_sync("the engine was put to sleep")
    found.wait(_LAST_CALL_SECONDS)


def _reason_against(trainer: Any) -> str:
    if batches.is_v1(trainer) and not batches.is_synchronous(trainer):
        return "V1's asynchronous trainers are not supported"
    actor = lookup(trainer.config, "actor_rollout_ref", "actor")
    engines = (lookup(actor, name) for name in ("megatron", "veomni", "fsdp_config"))
    for node in (actor, *engines):
        replay = lookup(node, "router_replay", "mode")
        if replay not in (None, "disabled"):
            return f"with router_replay {replay} the trainer needs the routes of an engine"
    if inspect.iscoroutinefunction(getattr(trainer, "fit", None)):
        return "asynchronous trainers are not supported"
    return ""


def _servers(trainer: Any) -> list[str]:
    """Return the addresses of the rollout's HTTP servers."""
    for name in ("llm_server_manager", "async_rollout_manager"):
        addresses = getattr(getattr(trainer, name, None), "server_addresses", None)
        if addresses:
            return [f"http://{each}" for each in addresses if ":" in str(each)]
    return []


def _max_length(trainer: Any) -> int | None:
    rollout = lookup(trainer.config, *_ROLLOUT)
    longest = lookup(rollout, "max_model_len")
    if longest is None:
        parts = [lookup(rollout, f"{name}_length") for name in ("prompt", "response")]
        longest = None if None in parts else sum(parts)
    return None if longest is None else int(longest) - 1  # the engine decodes one token after it


def _log_probs(trainer: Any, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """Score rows by verl's own `_compute_old_log_prob`, at temperature 1, on all ranks."""
    from verl import (  # pyright: ignore[reportMissingImports]
        DataProto,  # pyright: ignore[reportAttributeAccessIssue]
    )

    padded = _padded(rows, _batch_size(trainer, len(rows)), trainer.tokenizer.pad_token_id or 0)
    lengths = [len(row) for row in rows]
    batch = DataProto.from_dict(
        tensors=padded, meta_info={"temperature": 1.0, "global_token_num": lengths}
    )
    # Ours is no stage of a step: the method below the wrappers.
    compute = inspect.unwrap(type(trainer)._compute_old_log_prob)
    result = compute(trainer, batch)
    answer = result[0] if isinstance(result, tuple) else result
    values = answer.batch["old_log_probs"].tolist()
    return [own[: min(n - 1, SCORED)] for own, n in zip(values, lengths, strict=False)]


def _batch_size(trainer: Any, count: int) -> int:
    """Return the least number of rows that all ranks can share in whole micro-batches."""
    rollout = lookup(trainer.config, *_ROLLOUT)
    unit = int(getattr(trainer.actor_rollout_wg, "world_size", 1) or 1)
    if not lookup(rollout, "log_prob_use_dynamic_bsz"):
        unit *= int(lookup(rollout, "log_prob_micro_batch_size_per_gpu") or 1)
    return -(-count // unit) * unit


def _padded(rows: Sequence[tuple[int, ...]], size: int, pad: int) -> Mapping[str, Any]:
    """Return the columns of a batch whose responses are the last tokens of each row.

    Prompts are padded on the left and responses on the right, as verl's. The last row is repeated.
    """
    import torch

    rows = [*rows, *[rows[-1]] * (size - len(rows))]
    cuts = [len(row) - min(len(row) - 1, SCORED) for row in rows]
    width = max(cuts)
    length = max(len(row) - cut for row, cut in zip(rows, cuts, strict=True))
    ids = torch.full((size, width + length), pad, dtype=torch.int64)
    mask = torch.zeros((size, width + length), dtype=torch.int64)
    for at, (row, cut) in enumerate(zip(rows, cuts, strict=True)):
        begin = width - cut
        ids[at, begin : begin + len(row)] = torch.tensor(row)
        mask[at, begin : begin + len(row)] = 1
    return {
        "prompts": ids[:, :width],
        "responses": ids[:, width:],
        "response_mask": mask[:, width:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }
