"""A canary of SkyRL: its driver asks the vLLM servers over HTTP, and the policy's workers score.

The workers score immediately before the sync. They use the dispatch's `forward`, with which each
step computes its log-probs on all of them. Colocated servers still sleep then. SkyRL's pass
divides by the rollout's temperature, so it scores only where that is 1.

Read in SkyRL 0.3.0 and 0.4.0.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from stagescope_workers.canary.sequences import SCORED, of_tokenizer
from stagescope_workers.integrations import canary
from stagescope_workers.integrations.configuration import lookup
from stagescope_workers.integrations.patches import log_once
from stagescope_workers.probe.probe import Probe

if TYPE_CHECKING:
    from stagescope_workers.canary.after_syncs import WeightCanary

CLIENT_MODULE: Final = "skyrl.backends.skyrl_train.inference_servers.remote_inference_client"
_BATCH_MODULE: Final = "skyrl.backends.skyrl_train.training_batch"
_LAST_CALL_SECONDS: Final = 10.0
"""How long the servers' sleep waits for a canary's last call, of eight short requests at most."""

Trainer: TypeAlias = Any
"""Attributes read from SkyRL's `RayPPOTrainer`: cfg, tokenizer, dispatch, inference_engine_client,
colocate_all."""


class SyncedTraining(Protocol):
    """The training whose weights are synced."""

    canary: WeightCanary | None

    @property
    def trainer(self) -> Trainer:
        """The trainer."""
        ...

    @property
    def probe(self) -> Probe:
        """The driver's probe."""
        ...

    @property
    def step(self) -> int:
        """The trainer's step, 0 before the first."""
        ...

    @property
    def is_trained(self) -> bool:
        """Whether the weights were updated in this step."""
        ...


def around(training: SyncedTraining) -> AbstractContextManager[None]:
    """Return a context for a weight sync: its canary is scored before and asked after."""

    def find() -> WeightCanary | None:
        every = canary.every()
        if every is not None and training.canary is None:
            training.canary = _make(training.trainer, training.probe, every)
        return training.canary

    def score(found: WeightCanary) -> None:
        trainer = training.trainer
        if reason := _reason_against(trainer.cfg):
            log_once(f"SkyRL: the canary has no trainer's side: {reason}")
        # Colocated servers are known to sleep only after an update.
        elif training.is_trained or not trainer.colocate_all:
            own = functools.partial(_log_probs, trainer)
            found.score(training.step, own, training.step or None)

    def ask(found: WeightCanary) -> None:
        found.after_sync(training.step, training.step or None)

    return canary.around_sync(find, before=score, after=ask)


async def drop(canaries: Iterable[WeightCanary | None]) -> None:
    """Drop what is asked, and wait for the call that runs: a sleeping server must have none."""
    for found in canaries:
        if found is not None:
            found.before_sync("the engine was put to sleep")
            await asyncio.to_thread(found.wait, _LAST_CALL_SECONDS)


def _make(trainer: Trainer, probe: Probe, every: int) -> WeightCanary:
    """Return the canary of a trainer."""
    client = trainer.inference_engine_client
    servers = [str(each) for each in getattr(client, "server_urls", None) or ()]
    if not servers:
        log_once(f"SkyRL: {canary.VARIABLE} asks no engine: the client has no server_urls")
    adapter = None
    if getattr(client, "uses_lora_weight_sync", False):
        adapter = getattr(sys.modules.get(CLIENT_MODULE), "SKYRL_LORA_ADAPTER_NAME", None)
    return probe.canary(
        engine=servers,
        sequences=of_tokenizer(trainer.tokenizer, max_length=_max_length(trainer.cfg)),
        tokenizer=trainer.tokenizer,
        temperature=_temperature(trainer.cfg),
        adapter=adapter,
        every=every,
    )


def _reason_against(config: object) -> str:
    temperature = lookup(config, "trainer", "algorithm", "temperature")
    if temperature is None:
        temperature = _temperature(config)
    if float(temperature) != 1.0:
        return f"SkyRL's pass divides by the temperature {temperature}, not 1"
    policy = lookup(config, "trainer", "policy")
    if lookup(policy, "megatron_config", "moe_enable_routing_replay"):
        return "with moe_enable_routing_replay it needs the routes of an engine"
    if lookup(config, "trainer", "algorithm", "enable_sample_support_replay"):
        return "with enable_sample_support_replay it needs the tokens that an engine allowed"
    return ""


def _log_probs(trainer: Trainer, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """Score rows on all workers of the policy, as SkyRL's own pass does."""
    import torch

    dispatch = trainer.dispatch
    unit = int(dispatch.get_lcm_dp_size())
    unit *= int(lookup(trainer.cfg, "trainer", "micro_forward_batch_size_per_gpu") or 1)
    size = -(-len(rows) // unit) * unit  # whole micro-batches on every rank
    padded = [*rows, *[rows[-1]] * (size - len(rows))]
    counts = [min(len(row) - 1, SCORED) for row in rows]
    width = max(map(len, rows))
    ids = torch.full((size, width), trainer.tokenizer.pad_token_id or 0, dtype=torch.int64)
    mask = torch.zeros((size, width), dtype=torch.int64)
    for at, row in enumerate(padded):
        ids[at, width - len(row) :] = torch.tensor(row)
        mask[at, width - len(row) :] = 1
    make_batch = importlib.import_module(_BATCH_MODULE).TrainingInputBatch
    batch = make_batch({"sequences": ids, "attention_mask": mask})
    batch.metadata = {"response_length": max(counts)}
    output = dispatch.forward("policy", batch)
    dispatch.empty_cache("policy")
    found = [each["logprobs"] for each in output.loss_fn_outputs]
    return [own[-count:] for own, count in zip(found, counts, strict=False)]


def _temperature(config: object) -> float:
    found = lookup(config, "generator", "sampling_params", "temperature")
    return 1.0 if found is None else float(found)


def _max_length(config: object) -> int | None:
    longest = lookup(config, "generator", "max_input_length")
    answer = lookup(config, "generator", "sampling_params", "max_generate_length")
    if longest is None or answer is None:
        return None
    return int(longest) + int(answer) - 1  # the engine decodes one token after it
