"""The trainer's model in transformers, scored as a hypothesis says."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers.utils import logging as progress

from stagescope_wire.engines.base import check_ids
from stagescope_wire.errors import EngineError
from stagescope_workers.bisect.variants import PLAIN, Float32, Int64, Variant
from stagescope_workers.consistency.transformers_engine import TransformersEngine, token_log_probs


class TransformersModel(TransformersEngine):
    """A `Model` of a directory.

    Args:
        path, dtype: see `TransformersEngine`.
        attention: implementation of the attention, such as "eager"; None: transformers' choice.

    Raises:
        NotFound, InvalidInput: see `TransformersEngine`.
        EngineError: the attention cannot be chosen.
    """

    def __init__(self, path: Path, dtype: str, attention: str | None = None) -> None:
        quiet: Any = progress.disable_progress_bar  # untyped
        quiet()
        super().__init__(path, dtype)
        if attention is not None:
            try:
                self._model.set_attn_implementation(attention)
            except (AttributeError, ValueError) as error:
                raise EngineError(
                    f"the attention of {path} cannot be set to {attention}: {error}"
                ) from error

    def score_as(
        self, row: Sequence[int], variant: Variant = PLAIN, routes: Int64 | None = None
    ) -> tuple[float, ...]:
        """Return the log-prob of each token of a row; NaN for the first.

        Args:
            row: the token ids.
            variant: how it is scored.
            routes: the experts of each token, [tokens, layers, K], -1: the router's own choice.

        Raises:
            EngineError: the routers of this model cannot be replaced.
        """
        with self._logits(row, variant, routes) as (logits, ids):
            if variant.softmax:
                own = torch.log_softmax(logits.to(_dtype(variant.softmax)), -1)
                found = own.gather(-1, ids[1:, None])[:, 0].float().tolist()
            else:
                found = token_log_probs(logits, ids[1:], 1.0)
        return (math.nan, *found)

    def logits_at(self, row: Sequence[int], indices: Sequence[int]) -> Float32:
        """Return the logits from which the tokens at these indices were drawn, [n, vocabulary]."""
        with self._logits(row, PLAIN, None) as (logits, _):
            chosen = logits[[index - 1 for index in indices]]
            found: Float32 = chosen.float().cpu().numpy()
        return found

    @contextlib.contextmanager
    def _logits(
        self, row: Sequence[int], variant: Variant, routes: Int64 | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the logits [tokens - 1, vocabulary] and the ids."""
        ids = torch.tensor(check_ids(row), device=self._model.device)
        positions = torch.arange(len(ids), device=ids.device)
        positions = (positions + variant.shift * (positions >= variant.shift_from)).clamp(min=0)
        options: dict[str, torch.Tensor] = {}
        if variant.shift:
            # Without the mask, transformers takes a jump for the begin of another packed sequence.
            options = {
                "position_ids": positions[None],
                "attention_mask": torch.ones_like(ids[None]),
            }
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            if variant.head:
                stack.enter_context(_head(self._model, _dtype(variant.head)))
            if routes is not None:
                stack.enter_context(_routed(self._model, routes))
            found = self._model(input_ids=ids[None], use_cache=False, **options)
            yield found.logits[0, :-1], ids


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


@contextlib.contextmanager
def _head(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Compute the output projection in another dtype."""
    head = model.get_output_embeddings()
    if head is None:
        raise EngineError("the model has no output projection", expected="a causal language model")
    weight = head.weight.to(dtype)
    bias = None if getattr(head, "bias", None) is None else head.bias.to(dtype)
    head.forward = lambda hidden: functional.linear(hidden.to(dtype), weight, bias)
    try:
        yield
    finally:
        del head.forward


@contextlib.contextmanager
def _routed(model: Any, routes: Int64) -> Iterator[None]:
    """Let the routers choose the recorded experts."""
    routers = [
        module for module in model.modules() if hasattr(module, "top_k") and _is_router(module)
    ]
    if len(routers) != routes.shape[1]:
        raise EngineError(
            f"{len(routers)} routers are known in the model, and {routes.shape[1]} were recorded",
            expected="routers that return logits, weights and experts (transformers 5)",
        )
    with contextlib.ExitStack() as stack:
        for layer, router in enumerate(routers):
            chosen = torch.from_numpy(routes[:, layer].copy()).to(router.weight.device)
            hook = router.register_forward_hook(_choosing(chosen))
            stack.callback(hook.remove)
        yield


def _is_router(module: Any) -> bool:
    return "router" in type(module).__name__.lower() and hasattr(module, "weight")


def _choosing(chosen: torch.Tensor) -> Callable[[Any, Any, Any], Any]:
    def hook(module: Any, _: Any, result: Any) -> Any:
        logits, weights, experts = result
        own = weights if weights.shape == experts.shape else weights.gather(-1, experts)
        recorded = torch.where(chosen < 0, experts, chosen.to(experts.dtype))
        for weigh in _WEIGHTS:
            if torch.allclose(weigh(logits, experts).to(own.dtype), own, rtol=1e-2, atol=1e-4):
                return logits, weigh(logits, recorded).to(own.dtype), recorded
        raise EngineError(
            f"the weights of {type(module).__name__} follow from its logits in an unknown way",
            expected="softmax or sigmoid, normalised or not",
        )

    return hook


def _softmax(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits.float(), -1).gather(-1, experts)


def _sigmoid(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(logits.float()).gather(-1, experts)


def _normalised(
    weigh: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def found(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        values = weigh(logits, experts)
        return values / values.sum(-1, keepdim=True)

    return found


_WEIGHTS = (_normalised(_softmax), _softmax, _normalised(_sigmoid), _sigmoid)
"""How routers make weights of logits, [tokens, experts] and [tokens, K] -> [tokens, K]."""
