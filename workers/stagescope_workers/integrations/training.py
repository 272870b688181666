"""The shared code of all trainers' integrations: a trainer's one probe, its end, its log."""

from __future__ import annotations

import abc
import contextlib
import numbers
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from stagescope_wire.nonfinite import Json
from stagescope_workers.integrations.patches import ending
from stagescope_workers.metrics_feed import MetricsFeed
from stagescope_workers.probe.lifecycle import finish
from stagescope_workers.probe.probe import Probe

if TYPE_CHECKING:
    import torch

FINISH_SECONDS: Final = 30.0
"""How long the end of a training waits for the run's receipts."""
FAILED_SECONDS: Final = 3.0
"""How long a training that failed waits for its own."""
NUMBERS_SECONDS: Final = 10.0
"""How long the last line of a training's log waits for the service's numbers."""
PREFIX: Final = "stagescope/"
"""Prefix of the service's numbers in a trainer's log."""

_NOT_SCALARS: Final = ("step", "policy_version", "stage")
"""Arguments of `log` of their own."""

_Training = TypeVar("_Training")


class ReportedTraining(abc.ABC):
    """Reports one trainer, whose loop runs in one thread.

    The probe is made at the first use, and closed when the training ends. A trainer that trains
    again gets another one.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)
        self._probe: Probe | None = None
        self._feed: MetricsFeed | None = None

    @abc.abstractmethod
    def _make_probe(self) -> Probe:
        """Return a probe of this process."""

    @property
    @abc.abstractmethod
    def last_step(self) -> int | None:
        """The last step that was trained here; None before the first."""

    @property
    def writes_log(self) -> bool:
        """Whether this process writes the trainer's log."""
        return True

    @property
    def trainer(self) -> Any:
        """The trainer."""
        return alive(self._trainer)

    @property
    def probe(self) -> Probe:
        """The probe of this process."""
        if self._probe is None:
            self._probe = self._make_probe()
            if self.writes_log:
                self._feed = MetricsFeed(self._probe)
                self._feed.prepare()
        return self._probe

    def want(self, step: int, rows: int | None = None) -> None:
        """Request a step's numbers for the trainer's log, as `MetricsFeed.want`."""
        if self._feed is not None:
            self._feed.request(step, rows)

    def numbers(self, step: int) -> dict[str, float]:
        """Return the service's numbers of a step by their names in the log, as far as they came."""
        found = {} if self._feed is None else self._feed.get(step)
        return {f"{PREFIX}{name}": value for name, value in found.items()}

    def wait_for_numbers(self) -> None:
        """Wait a little for the numbers of the last steps: the training is over, its log is not."""
        if self._feed is not None:
            self._feed.wait(NUMBERS_SECONDS)

    def close(self, error: BaseException | None) -> None:
        """Send what waits: the training is over, or ends with `error`."""
        feed, self._feed = self._feed, None
        probe, self._probe = self._probe, None
        if feed is not None:
            feed.close()
        close_probe(probe, error, None if error is not None or probe is None else self.last_step)


def close_probe(
    probe: Probe | None, error: BaseException | None = None, last_step: int | None = None
) -> None:
    """Send what waits: the training is over after `last_step`, or ends with `error`."""
    if probe is None:
        return
    if error is not None:
        probe.close(FAILED_SECONDS)
        return
    if last_step is not None:
        probe.end_step(last_step)
    finish(FINISH_SECONDS, run=probe.run)


def closed_at_end(
    close: Callable[[BaseException | None], None],
) -> contextlib.AbstractContextManager[None]:
    """Return a context for a training: `close` gets the exception that ends it, or None."""
    return ending("closing the probe", close)


def alive(reference: weakref.ref[Any]) -> Any:
    """Return the trainer that `reference` refers to.

    Raises:
        ReferenceError: it is gone.
    """
    trainer = reference()
    if trainer is None:
        raise ReferenceError("the trainer is gone")
    return trainer


def one_a_trainer(make: Callable[[Any], _Training]) -> Callable[[Any], _Training]:
    """Return a function from a trainer to what `make` made of it; it keeps no trainer alive."""
    known: weakref.WeakKeyDictionary[object, _Training] = weakref.WeakKeyDictionary()

    def find(trainer: Any) -> _Training:
        found = known.get(trainer)
        if found is None:
            found = known[trainer] = make(trainer)
        return found

    return find


def scalars(logged: object, *, without: Collection[str] = ()) -> dict[str, Json]:
    """Return the numbers that a trainer logs by name, without ours and those of `without`.

    They are keyword arguments of `Probe.log` or `Stage.log`: floats, whose names are none of
    these methods' own.
    """
    if not isinstance(logged, Mapping):
        return {}
    return {
        str(name): float(value)
        for name, value in logged.items()
        if _is_number(value) and name not in (*_NOT_SCALARS, *without)
        if not str(name).startswith(PREFIX)
    }


def _is_number(value: object) -> bool:
    if isinstance(value, numbers.Real):
        return not isinstance(value, bool)
    return getattr(value, "ndim", None) == 0 and hasattr(value, "item")


class ClipBounds(NamedTuple):
    """Bounds on the ratio exp(log_prob - old_log_prob) beyond which a token has no gradient."""

    low: float
    """With a negative advantage."""
    high: float
    """With a positive advantage."""
    dual: float | None = None
    """The upper one with a negative advantage (dual clipping, arXiv 1912.09729)."""


def clipped(log_ratio: Any, advantages: Any, bounds: ClipBounds) -> Any:
    """Return -1 or 1 (int8) where the clipped loss is constant in a token's ratio, else 0."""
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    low = (ratio < bounds.low) & (advantages < 0)
    high = (ratio > bounds.high) & (advantages > 0)
    if bounds.dual is not None:
        high = high | ((ratio > bounds.dual) & (advantages < 0))
    return high.char() - low.char()


class MicrobatchBuffer:
    """Records of the loss in the micro-batches of one mini-batch, packed into one payload.

    Packing needs one copy to the host for each name, instead of one for each micro-batch.
    """

    def __init__(self) -> None:
        self._parts: list[Mapping[str, Any]] = []
        self._lengths: list[int] = []
        self._ids: list[str] | None = []

    def add(
        self, tensors: Mapping[str, Any], lengths: Sequence[int], ids: Sequence[str] | None = None
    ) -> None:
        """Add a micro-batch: flat tensors on the model's device, lengths and ids of its rows."""
        self._parts.append(tensors)
        self._lengths += lengths
        self._ids = None if ids is None or self._ids is None else [*self._ids, *ids]

    def pop_all(self) -> dict[str, Any]:
        """Return the micro-batches as one packed payload, and empty the buffer."""
        import torch

        parts, lengths, ids = self._parts, self._lengths, self._ids
        self._parts, self._lengths, self._ids = [], [], []
        if not parts:
            return {}
        names = set.intersection(*(set(part) for part in parts))
        packed = {name: torch.cat([part[name] for part in parts]) for name in sorted(names)}
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        return {**packed, "cu_seqlens": ends, **({"sample_ids": ids} if ids else {})}


_RESULTS: Final = {"advantages": "advantages", "returns": "returns", "values": "values"}
COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "skyrl": {
        "loss_mask": "response_mask", "rollout_logprobs": "rollout_log_probs",
        "action_log_probs": "old_log_probs", "base_action_log_probs": "ref_log_probs", **_RESULTS,
    },
    "nemo_rl": {
        "token_ids": "responses", "input_ids": "responses", "token_mask": "response_mask",
        "generation_logprobs": "rollout_log_probs", "prev_logprobs": "old_log_probs",
        "reference_policy_logprobs": "ref_log_probs", "advantages": "advantages",
    },
    "openrlhf": {
        "action_mask": "response_mask", "rollout_log_probs": "rollout_log_probs",
        "action_log_probs": "old_log_probs", "base_action_log_probs": "ref_log_probs", **_RESULTS,
    },
}  # fmt: skip
"""Trainer -> its columns by our names."""
_ZERO_IS_MISSING: Final = {
    "nemo_rl": "prev_logprobs",  # with force_on_policy_ratio
    "openrlhf": "rollout_log_probs",  # its agent has no log-prob of the engine
}
"""Trainer -> its column in which 0.0 stands for a missing value."""


def read_batch(batch: Mapping[str, Any], trainer: str) -> dict[str, object]:
    """Return a trainer's columns by the names of `Stage.record`.

    A stream that is 0.0 throughout, where the trainer writes 0.0 for a missing value, is left out:
    `missing_streams` names it, and `left_out` says why.
    """
    names = COLUMNS[trainer]
    found: dict[str, object] = {names[name]: values for name, values in batch.items()}
    theirs = _ZERO_IS_MISSING[trainer]
    if theirs in batch and not bool((batch[theirs] != 0).any()):
        absent = names[theirs]
        del found[absent]
        why = f"0.0 in every token, which {trainer} writes where it has no value"
        found["missing_streams"] = [absent]
        found["left_out"] = {absent: f"{why}: it is not measured"}
    return found


def behind_masked(passes: torch.Tensor) -> torch.Tensor:
    """Return routes [..., tokens, layers, K] of the passes behind the mask's tokens, as recorded.

    Each begins one token before its mask. The row of zeros at the end stands for the last token,
    which no pass reads.
    """
    import torch

    return torch.cat([passes, torch.zeros_like(passes[..., :1, :, :])], dim=-3)


_MEGATRON: Final = {
    "tp_rank": "get_tensor_model_parallel_rank",
    "tp_size": "get_tensor_model_parallel_world_size",
    "pp_rank": "get_pipeline_model_parallel_rank",
    "pp_size": "get_pipeline_model_parallel_world_size",
    "cp_rank": "get_context_parallel_rank",
    "cp_size": "get_context_parallel_world_size",
    "ep_rank": "get_expert_model_parallel_rank",
    "ep_size": "get_expert_model_parallel_world_size",
    "etp_rank": "get_expert_tensor_parallel_rank",
    "etp_size": "get_expert_tensor_parallel_world_size",
}


def megatron_layout() -> dict[str, int]:
    """Return Megatron's layout columns, where this process has initialised it; else none."""
    state: ModuleType | None = sys.modules.get("megatron.core.parallel_state")
    found: dict[str, int] = {}
    with contextlib.suppress(Exception):
        if state is None or not state.model_parallel_is_initialized():
            return {}
    for name, function in _MEGATRON.items() if state is not None else ():
        with contextlib.suppress(Exception):
            found[name] = int(getattr(state, function)())
    return found
