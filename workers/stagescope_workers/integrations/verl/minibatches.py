"""An update as verl runs it: a part of the stage for each mini-batch, with no gap between them."""

from __future__ import annotations

import contextlib
import contextvars
import numbers
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

import torch

from stagescope.wire.errors import StagescopeError
from stagescope_workers.integrations.verl import batches
from stagescope_workers.integrations.verl import context as contexts
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.integrations.verl.guard import guarded
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage


class MicrobatchBuffer:
    """What the loss of a mini-batch's micro-batches had in hand."""

    def __init__(self) -> None:
        self._tensors: list[dict[str, torch.Tensor]] = []
        self._ids: list[str] | None = []

    def add(self, tensors: dict[str, torch.Tensor], ids: list[str] | None) -> None:
        """Take a micro-batch: tensors [rows, tokens] on the model's device, ids of the rows."""
        self._tensors.append(tensors)
        if ids is None or self._ids is None:
            self._ids = None
        else:
            self._ids += ids

    def take(self) -> dict[str, Any]:
        """Return what was added as one packed payload, and begin anew."""
        tensors, self._tensors = self._tensors, []
        ids, self._ids = self._ids, []
        if not tensors:
            return {}
        # Packed: a copy to the host for each name, and not for each row or micro-batch.
        lengths = [width for item in tensors for width in _widths(item["response_mask"])]
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        names = set.intersection(*(set(item) for item in tensors))
        packed: dict[str, Any] = {
            name: torch.cat([item[name].reshape(-1) for item in tensors]) for name in sorted(names)
        }
        return {**packed, "cu_seqlens": ends, "sample_ids": ids or None}


def _widths(tensor: torch.Tensor) -> list[int]:
    rows, width = tensor.shape
    return [int(width)] * int(rows)


_current: Final[contextvars.ContextVar[Minibatches | None]] = contextvars.ContextVar(
    "stagescope_minibatches", default=None
)


def current() -> Minibatches | None:
    """Return the update that the caller is part of, or None."""
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


class Minibatches:
    """The parts of one `train_mini_batch` call.

    The first begins with the call (loading what was offloaded is part of it), each ends where
    `train_batch` returns and the next begins there, the last ends with the call.
    """

    def __init__(
        self,
        probe: Probe,
        name: str,
        context: Context,
        *,
        model: object,
        a_epoch: int | None,
        epochs: int,
        collects: bool,
    ) -> None:
        """Make the parts of an update.

        Args:
            probe: of the rank and role.
            name: the stage.
            context: what was planted.
            model: the module, or Megatron's chunks.
            a_epoch: mini-batches in an epoch, where that is known.
            epochs: how many.
            collects: whether the loss hands over the two log-prob streams (bypass mode).
        """
        self.buffer = MicrobatchBuffer() if collects else None
        self.is_reported = context.stages
        """Whether it is a stage that was asked for, and not only the way of the log-probs."""
        self._probe = probe
        self._name = name
        self._context = context
        self._model = model
        self._a_epoch = a_epoch
        self._total = None if a_epoch is None else a_epoch * epochs
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
        """Say whether each row is seen for the first time."""
        return self._a_epoch is None or self._done < self._a_epoch

    def advance(self, metrics: Any) -> None:
        """A mini-batch is over: end its part and begin the next, if there is one."""
        if isinstance(metrics, Mapping) and self._stage is not None:
            with guarded("the scalars of a mini-batch"):
                self._stage.log(**_numbers(metrics))
        self._done += 1
        if self._total is None or self._done < self._total:
            self._end(None)
            self._begin()

    def _begin(self) -> None:
        epoch, minibatch = (
            (0, self._done) if not self._a_epoch else divmod(self._done, self._a_epoch)
        )
        context = self._context
        with guarded("the mini-batches of an update", but=StagescopeError):
            self._stage = self._probe.begin(
                self._name,
                step=context.step,
                policy_version=context.policy_version,
                model=self._model,
                epoch=epoch,
                minibatch=minibatch,
            )

    def _known(self, taken: Mapping[str, Any]) -> dict[str, Any]:
        context = self._context
        if not context.synchronous:
            return {}
        return batches.one_version(context.policy_version, len(taken["cu_seqlens"]) - 1)

    def _end(self, error: BaseException | None) -> None:
        stage, self._stage = self._stage, None
        if stage is None:
            return
        if self.buffer is not None:
            with guarded("the log-probs of the loss"):
                taken = self.buffer.take()
                if taken:
                    stage.record({**taken, **self._known(taken), **self._context.streams})
        with guarded("the mini-batches of an update", but=StagescopeError if not error else ()):
            stage.end(error)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, numbers.Real) and not isinstance(value, bool)
    }


def run_ppo_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return verl's `ppo_loss` that hands over what met in it."""

    def run(config: Any, model_output: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(config, model_output, data, *args, **kwargs)
        with guarded("the log-probs of the loss"):
            _collect(model_output, data)
        return result

    return run


def _collect(model_output: Any, data: Any) -> None:
    update = current()
    if update is None or update.buffer is None or not update.is_first_epoch:
        return
    from verl.workers.utils.padding import no_padding_2_padding  # pyright: ignore[reportMissingImports]

    held = [name for name in ("rollout_log_probs", "responses") if name in data.keys()]  # noqa: SIM118
    with torch.no_grad():
        padded = data.select("response_mask", "old_log_probs", *held).to_padded_tensor()
        mask = padded["response_mask"]
        rollout = padded["rollout_log_probs" if "rollout_log_probs" in held else "old_log_probs"]
        tensors = {
            "log_probs": no_padding_2_padding(model_output["log_probs"].detach(), data),
            "rollout_log_probs": rollout,
            "response_mask": mask,
        }
        if "responses" in held and padded["responses"].shape == mask.shape:
            tensors["responses"] = padded["responses"]
    update.buffer.add(tensors, contexts.rows_of(data, contexts.SAMPLES))
