"""A canary of OpenRLHF: each rank scores before the sync, rank 0 asks its vLLM actors after it.

OpenRLHF's engines are Ray actors without an HTTP server. Rank 0 has their handles, since it sends
them the weights, and asks by their `generate`, the call of its agents. The ranks score by the
actor's own forward, all of them in `broadcast_to_vllm`, which is collective itself.

With `vllm.enable_sleep` the engines have no memory for a request from the sync until the trainer
generates, which only its driver knows: there is no canary then.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from stagescope_wire.errors import EngineError
from stagescope_wire.nonfinite import Json
from stagescope_workers.canary.engine_arms import Cache, Decoded, Rows
from stagescope_workers.canary.sequences import SCORED, Row, of_tokenizer
from stagescope_workers.integrations import canary
from stagescope_workers.integrations.configuration import lookup
from stagescope_workers.integrations.patches import log_once
from stagescope_workers.probe.probe import Probe

if TYPE_CHECKING:
    from stagescope_workers.canary.after_syncs import WeightCanary

_CALL_SECONDS: Final = 30.0
_LAST_CALL_SECONDS: Final = 10.0
"""How long a sync waits for a canary's last call: vLLM empties no prefix cache that is in use."""
_LIKELIEST: Final = 20
"""vLLM's own limit. With `processed_logprobs` OpenRLHF limits it to 1."""

Trainer: TypeAlias = Any
"""Attributes read from OpenRLHF's `ActorPPOTrainer`: args, actor, strategy, tokenizer,
vllm_engines."""


class SyncedTraining(Protocol):
    """The training whose weights are synced."""

    canary: WeightCanary | None


def around(
    training: SyncedTraining, trainer: Trainer, probe: Probe, step: int
) -> AbstractContextManager[None]:
    """Return a context for the sync after `step`; every rank enters it."""

    def find() -> WeightCanary | None:
        every = canary.every()
        if every is not None and training.canary is None:
            training.canary = _make(trainer, probe, every)
        return training.canary

    def score(found: WeightCanary) -> None:
        if lookup(trainer.args, "vllm", "enable_prefix_caching"):
            found.wait(_LAST_CALL_SECONDS)
        found.score(step, functools.partial(_log_probs, trainer), step)

    return canary.around_sync(find, before=score, after=lambda found: found.after_sync(step, step))


def _make(trainer: Trainer, probe: Probe, every: int) -> WeightCanary | None:
    arguments = trainer.args
    if lookup(arguments, "vllm", "enable_sleep"):
        log_once(f"OpenRLHF: {canary.VARIABLE} has no effect with vllm.enable_sleep: after a sync "
                 "only the driver knows when the engines are awake")  # fmt: skip
        return None
    length = lookup(arguments, "data", "max_len")
    engines = enumerate(trainer.vllm_engines or ()) if probe.rank == 0 else ()
    return probe.canary(
        engine=[RayEngine(f"vllm-{at}", handle, arguments) for at, handle in engines],
        sequences=of_tokenizer(
            trainer.tokenizer, max_length=None if length is None else int(length) - 1
        ),
        tokenizer=trainer.tokenizer,
        temperature=float(lookup(arguments, "rollout", "temperature") or 1.0),
        every=every,
    )


def _log_probs(trainer: Trainer, rows: Sequence[Row]) -> list[list[float]]:
    """Score rows by the actor's forward at temperature 1, one row at a time."""
    import torch

    actor = trainer.actor
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    was_training, temperature = actor.training, actor.temperature
    found: list[list[float]] = []
    actor.eval()
    actor.temperature = 1.0
    try:
        with torch.no_grad():
            for row in rows:
                ids = torch.tensor([row], device=device)
                mask = torch.ones_like(ids)
                last = mask[:, : min(len(row) - 1, SCORED)]
                group = trainer.strategy.ring_attn_group
                values = actor(ids, last, attention_mask=mask, ring_attn_group=group)
                found.append(values[0].float().tolist())
    finally:
        actor.temperature = temperature
        actor.train(was_training)
    return found


class RayEngine:
    """The scorer of a `RolloutRayActor`; see `canary.engine_arms.Scorer`.

    Args:
        name: of the instance.
        handle: of the Ray actor.
        arguments: OpenRLHF's.
    """

    def __init__(self, name: str, handle: Any, arguments: object) -> None:
        self.name = name
        self._handle = handle
        self.cache: Cache = (
            "unsalted" if lookup(arguments, "vllm", "enable_prefix_caching") else "none"
        )
        self.max_length: int | None = lookup(arguments, "data", "max_len")
        options = lookup(arguments, "algo", "advantage")
        level = lookup(options, "is_correction_level")  # 0.11.2
        self.processed: bool | None = level not in (None, "off") or bool(
            lookup(options, "is_correction_enable")
        )
        self.settings: Mapping[str, Json] = {"kind": "vllm", "processed": self.processed}

    def decode(self, rows: Rows, n: int, *, seed: int, temperature: float) -> list[Decoded]:
        """Continue each row; see `Scorer.decode`."""
        count = 1 if self.processed else _LIKELIEST
        told = [
            {"max_tokens": n, "temperature": temperature, "seed": seed + at, "logprobs": count}
            for at in range(len(rows.rows))
        ]
        found = []
        for answer in self._generate(rows, told):
            output = answer.outputs[0]
            ids, places = tuple(output.token_ids), output.logprobs
            found.append(
                Decoded(
                    ids,
                    tuple(place[token].logprob for token, place in zip(ids, places, strict=True)),
                    tuple(_sorted(place) for place in places) if count > 1 else (),
                )
            )
        return found

    def score(self, rows: Rows) -> list[tuple[float, ...]]:
        """Return the log-probs of given tokens; see `Scorer.score`.

        vLLM reads no prefix cache for them.
        """
        told = [{"max_tokens": 1, "prompt_logprobs": 1}] * len(rows.rows)
        return [
            (
                math.nan,
                *(
                    place[token].logprob
                    for token, place in zip(row[1:], answer.prompt_logprobs[1:], strict=True)
                ),
            )
            for row, answer in zip(rows.rows, self._generate(rows, told), strict=True)
        ]

    def tokenise(self, text: str) -> None:
        """Return None: the actor accepts token ids only."""

    def _generate(self, rows: Rows, told: Sequence[Mapping[str, Any]]) -> list[Any]:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        if rows.model is not None:
            raise EngineError(f"{self.name} selects no model by name", expected="no adapter")
        calls = [
            self._handle.generate.remote([*row], SamplingParams(**each))
            for row, each in zip(rows.rows, told, strict=True)
        ]
        ray: Any = sys.modules["ray"]  # which made the handle
        answers: list[Any] = ray.get(calls, timeout=_CALL_SECONDS)
        return answers


def _sorted(place: Mapping[int, Any]) -> tuple[float, ...]:
    return tuple(sorted((each.logprob for each in place.values()), reverse=True))
