"""The experts that the routers of a torch model choose, by forward hooks on its gates.

::

    with trainer_routes(model) as routes:
        logits = model(input_ids).logits
    stage.record(trainer_routed_experts=routes.take(input_ids.shape), ...)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from stagescope_wire.errors import EngineError

_LEAVES: Final = frozenset({"gate", "router"})
"""Names of modules that choose experts."""
_NUMBERS: Final = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_router_topk", "top_k",
)  # fmt: skip
"""Names of the number of experts of a token (K) in configurations."""
_IN_GROUPS: Final = ("e_score_correction_bias", "expert_bias")
"""Attributes of routers whose logits alone do not say which experts they choose."""


class GateRoutes:
    """The experts that the gates of a model chose since the last `take`."""

    def __init__(self, layers: int) -> None:
        self._chosen: list[list[torch.Tensor]] = [[] for _ in range(layers)]

    @property
    def layers(self) -> int:
        """Number of layers with a gate."""
        return len(self._chosen)

    def add(self, layer: int, experts: torch.Tensor) -> None:
        """Add the experts [tokens, K] of a pass."""
        self._chosen[layer].append(experts.detach().to(torch.int16))

    def take(self, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return the routes since the last call, int16 [tokens, layers, K], on the model's device.

        Args:
            shape: rows and tokens of the input ids: then they are [rows, tokens, layers, K].

        Raises:
            EngineError: layers made different numbers of passes, such as when activations are
                computed again in the backward pass.
        """
        chosen = [torch.cat(each) for each in self._chosen if each]
        for each in self._chosen:
            each.clear()
        if not chosen or len({each.shape for each in chosen}) > 1:
            sizes = sorted({each.shape[0] for each in chosen})
            raise EngineError(
                f"the gates of {len(chosen)} of {self.layers} layers chose experts for {sizes} "
                "tokens",
                expected="one pass in each layer",
                advice="take the routes after each forward pass",
            )
        routes = torch.stack(chosen, dim=1)
        return routes if shape is None else routes.reshape(*shape, *routes.shape[1:])


@contextlib.contextmanager
def trainer_routes(model: torch.nn.Module, top_k: int | None = None) -> Iterator[GateRoutes]:
    """Record the experts that a model chooses, for the duration of the block.

    It knows routers that return experts (transformers 5), a map of experts (Megatron), and gates
    that return logits.

    Args:
        model: with layers of experts.
        top_k: experts of a token; None: as the model's configuration says.

    Raises:
        EngineError: no gate is known in the model.
    """
    handles, routes = hook_gates(model, top_k)
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()


def hook_gates(model: torch.nn.Module, top_k: int | None = None) -> tuple[list[Any], GateRoutes]:
    """Hook the gates of a model; return the handles, and what the gates choose from now on.

    Raises:
        EngineError: no gate is known in the model, or its logits do not say what it chooses.
    """
    gates = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _LEAVES or type(module).__name__.endswith("Router")
    ]
    gates = [each for each in gates if any(True for _ in each.parameters(recurse=False))]
    if not gates:
        raise EngineError(
            f"no gate is known in {type(model).__name__}",
            expected=f"modules named {' or '.join(sorted(_LEAVES))}",
        )
    routes, count = GateRoutes(len(gates)), top_k or _top_k(model)
    return [
        gate.register_forward_hook(_recording(routes, layer, count))
        for layer, gate in enumerate(gates)
    ], routes


def _recording(
    routes: GateRoutes, layer: int, top_k: int | None
) -> Callable[[torch.nn.Module, Any, Any], None]:
    def hook(gate: torch.nn.Module, _: Any, result: Any) -> None:
        routes.add(layer, _experts(gate, result, top_k))

    return hook


def _experts(gate: torch.nn.Module, result: Any, top_k: int | None) -> torch.Tensor:
    """Return the experts [tokens, K] that a gate's result names."""
    parts = result if isinstance(result, tuple | list) else (result,)
    tensors = [each for each in parts if isinstance(each, torch.Tensor)]
    for each in reversed(tensors):
        if each.dtype == torch.bool:  # which experts, of all
            count = int(each.sum(dim=-1).max())
            return each.flatten(0, -2).to(torch.int8).topk(count, dim=-1).indices
        if not each.is_floating_point():
            return each.flatten(0, -2)
    if any(getattr(gate, name, None) is not None for name in _IN_GROUPS) or top_k is None:
        raise EngineError(
            f"the logits of {type(gate).__name__} do not say which experts it chooses",
            expected="a gate that chooses the largest logits, and top_k",
            advice="record the routes that the engine or the trainer returns",
        )
    return tensors[0].flatten(0, -2).topk(top_k, dim=-1).indices


def _top_k(model: torch.nn.Module) -> int | None:
    places = [getattr(model, "config", None), model]
    places += [getattr(place, "text_config", None) for place in places[:1]]
    for place in places:
        for name in _NUMBERS:
            value = getattr(place, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
