"""Reports verl's updates: one part of the stage per mini-batch, without gaps between them."""

from __future__ import annotations

import contextlib
import contextvars
import numbers
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch

from stagescope_wire.errors import StagescopeError
from stagescope_workers.integrations.configuration import lookup
from stagescope_workers.integrations.patches import after, guarded
from stagescope_workers.integrations.training import ClipBounds, MicrobatchBuffer, clipped
from stagescope_workers.integrations.verl import batches
from stagescope_workers.integrations.verl import context as contexts
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

STREAMS: Final = "streams"
CLIPPED: Final = "clipped"

_current: Final[contextvars.ContextVar[Minibatches | None]] = contextvars.ContextVar(
    "stagescope_minibatches", default=None
)


def current() -> Minibatches | None:
    """Return the update inside which the caller runs, or None."""
    return _current.get()


@contextlib.contextmanager
def entered(update: Minibatches) -> Iterator[None]:
    """Run an update as the current one."""
    token = _current.set(update)
    try:
        with update:
            yield
    finally:
        _current.reset(token)


class Epochs(NamedTuple):
    """How often an update goes over its rows."""

    number: int
    minibatches: int | None
    """Number of mini-batches in one epoch; None where unknown."""


class Minibatches:
    """The parts of one `train_mini_batch` call.

    The first begins with the call (and includes loading offloaded weights), each ends where
    `train_batch` returns and the next begins there, the last ends with the call.
    """

    def __init__(
        self,
        probe: Probe,
        name: str,
        context: Context,
        *,
        model: object,
        epochs: Epochs,
        collects: frozenset[str],
    ) -> None:
        """Prepare the parts of an update.

        Args:
            probe: the probe of the rank and role.
            name: the stage.
            context: the driver's context.
            model: the module, or Megatron's chunks.
            epochs: the epochs of the update.
            collects: what the loss records of each token: STREAMS (bypass mode), CLIPPED.
        """
        self.collects = collects
        self.buffer = MicrobatchBuffer() if collects else None
        self.is_reported = context.stages
        """False where stages are not reported, and this one only transports the log-probs."""
        self._probe = probe
        self._name = name
        self._context = context
        self._model = model
        self._batches_per_epoch = epochs.minibatches
        self._total = None if epochs.minibatches is None else epochs.minibatches * epochs.number
        self._done = 0
        self._stage: Stage | None = None

    def __enter__(self) -> Minibatches:
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    @property
    def is_first_epoch(self) -> bool:
        """Whether each row is processed for the first time."""
        return self._batches_per_epoch is None or self._done < self._batches_per_epoch

    def advance(self, metrics: object) -> None:
        """End the part of a mini-batch, and begin the next if there is one."""
        if isinstance(metrics, Mapping) and self._stage is not None:
            with guarded("the scalars of a mini-batch"):
                self._stage.log(**_numbers(metrics))
        self._done += 1
        if self._total is None or self._done < self._total:
            self._end(None)
            self._begin()

    def _begin(self) -> None:
        size = self._batches_per_epoch
        epoch, minibatch = divmod(self._done, size) if size else (0, self._done)
        context = self._context
        with guarded("the mini-batches of an update", reraise=StagescopeError):
            self._stage = self._probe.begin(
                self._name,
                step=context.step,
                policy_version=context.policy_version,
                model=self._model,
                epoch=epoch,
                minibatch=minibatch,
            )

    def _versions(self, payload: Mapping[str, Any]) -> dict[str, object]:
        context = self._context
        if not context.synchronous:
            return {}
        return batches.constant_versions(context.policy_version, len(payload["cu_seqlens"]) - 1)

    def _end(self, error: BaseException | None) -> None:
        stage, self._stage = self._stage, None
        if stage is None:
            return
        if self.buffer is not None:
            with guarded("the log-probs of the loss"):
                payload = self.buffer.pop_all()
                if payload:
                    stage.record({**payload, **self._versions(payload), **self._context.streams})
        with guarded("the mini-batches of an update", reraise=StagescopeError if not error else ()):
            stage.end(error)


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, numbers.Real) and not isinstance(value, bool)
    }


@after("the tokens of the loss")
def wrap_ppo_loss(
    result: object, config: object, model_output: Any, data: Any, *args: object, **kwargs: object
) -> None:
    """Wrap verl's `ppo_loss`: it collects which tokens are clipped, and in bypass mode streams."""
    update = current()
    if update is None or update.buffer is None:
        return
    from verl.workers.utils.padding import no_padding_2_padding  # pyright: ignore[reportMissingImports]

    has_streams = STREAMS in update.collects and update.is_first_epoch
    bounds = _clip_bounds(config) if CLIPPED in update.collects else None
    if not has_streams and bounds is None:
        return
    optional = [
        name
        for name in ("rollout_log_probs", "responses", "advantages")
        if name in data.keys()  # noqa: SIM118
    ]
    with torch.no_grad():
        padded = data.select("response_mask", "old_log_probs", *optional).to_padded_tensor()
        mask, old = padded["response_mask"], padded["old_log_probs"]
        log_probs = no_padding_2_padding(model_output["log_probs"].detach(), data)
        tensors = {"response_mask": mask}
        if has_streams:
            tensors["log_probs"] = log_probs
            rollout = "rollout_log_probs" if "rollout_log_probs" in optional else "old_log_probs"
            tensors["rollout_log_probs"] = padded[rollout]
            if "responses" in optional and padded["responses"].shape == mask.shape:
                tensors["responses"] = padded["responses"]
        if bounds is not None and "advantages" in optional:
            tensors["clipped"] = clipped(log_probs - old, padded["advantages"], bounds)
    if len(tensors) > 1:
        count, width = mask.shape
        flat = {name: values.reshape(-1) for name, values in tensors.items()}
        ids = contexts.row_strings(data, contexts.SAMPLES)
        update.buffer.add(flat, [int(width)] * int(count), ids)


def _clip_bounds(config: object) -> ClipBounds | None:
    """Return the bounds of verl's vanilla policy loss; None: another loss, or not readable."""
    mode = lookup(config, "policy_loss", "loss_mode")
    if config is None or mode not in (None, "vanilla"):
        return None
    ratio = lookup(config, "clip_ratio")
    low, high = (lookup(config, f"clip_ratio_{side}") for side in ("low", "high"))
    dual = lookup(config, "clip_ratio_c")
    low, high = (ratio if bound is None else bound for bound in (low, high))
    if low is None or high is None:
        return None
    return ClipBounds(1.0 - float(low), 1.0 + float(high), 3.0 if dual is None else float(dual))
