"""The experts that vLLM chooses, recorded in its workers.

vLLM's own `enable_return_routed_experts` needs kernels that some platforms lack. This extension
hooks the gates of its model instead::

    extension = "stagescope_workers.integrations.vllm_routes.RecordRoutes"
    llm = LLM(model, worker_extension_cls=extension)
    llm.collective_rpc("record_routes")
    ...                                                  # generate
    records = llm.collective_rpc("take_routes")[0]
    routes = routes_of(records, rows)                    # rows: ids of prompt and response

Over HTTP it is `/collective_rpc` of the server with `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from stagescope_workers.integrations.gates import GateRoutes

Routes = npt.NDArray[np.int16]
Record = Mapping[str, Any]
"""One request: `request`, its id; `tokens`, the ids of its passes, -1 where none was made; `shape`
and `routes`, base64 of int16 [tokens, layers, K]."""

_MAX_REQUESTS: Final = 4096
"""Requests that a worker keeps until `take_routes`; the oldest are dropped."""


class RecordRoutes:
    """What vLLM's worker inherits; `record_routes` and `take_routes` are called by RPC."""

    model_runner: Any
    _routes_handles: list[Any] | None = None
    _routes_by_request: dict[str, tuple[list[int], list[Routes]]]
    _routes_gates: GateRoutes

    def record_routes(self, on: bool = True) -> dict[str, int]:
        """Record the routes of all requests from now on, or stop; return the number of `layers`.

        Raises:
            EngineError: no gate is known in the model.
        """
        runner = self.model_runner
        for handle in self._routes_handles or ():
            handle.remove()
        self._routes_handles, self._routes_by_request = None, {}
        runner.__dict__.pop("_model_forward", None)
        if not on:
            return {"layers": 0}
        from stagescope_workers.integrations.gates import hook_gates

        config = runner.model_config.hf_text_config
        top_k = getattr(config, "num_experts_per_tok", None)
        self._routes_handles, self._routes_gates = hook_gates(runner.get_model(), top_k)
        own = runner._model_forward

        def forward(*args: Any, **named: Any) -> Any:
            result = own(*args, **named)
            self._routes_note(*args, **named)
            return result

        runner._model_forward = forward
        return {"layers": self._routes_gates.layers}

    def _routes_note(
        self, input_ids: Any = None, positions: Any = None, *_: Any, **__: Any
    ) -> None:
        """Keep the routes of a pass by request and position."""
        runner = self.model_runner
        routes: Routes = self._routes_gates.take().cpu().numpy()
        requests = runner.input_batch.req_ids
        if input_ids is None or not requests:
            return
        bounds = runner.query_start_loc.np[: len(requests) + 1].tolist()
        ids, places = input_ids.tolist(), positions.tolist()
        for request, begin, end in zip(requests, bounds, bounds[1:], strict=False):
            tokens, kept = self._routes_by_request.setdefault(request, ([], []))
            for at in range(begin, end):
                place = int(places[at])
                while len(tokens) <= place:
                    tokens.append(-1)
                    kept.append(np.full_like(routes[at], -1))
                tokens[place], kept[place] = int(ids[at]), routes[at]
        while len(self._routes_by_request) > _MAX_REQUESTS:
            del self._routes_by_request[next(iter(self._routes_by_request))]

    def take_routes(self) -> list[Record]:
        """Return and forget what was recorded of each request."""
        taken, self._routes_by_request = self._routes_by_request, {}
        return [
            {
                "request": request,
                "tokens": tokens,
                "shape": [len(kept), *kept[0].shape],
                "routes": base64.b64encode(np.stack(kept).tobytes()).decode(),
            }
            for request, (tokens, kept) in taken.items()
        ]


def routes_of(records: Iterable[Record], rows: Sequence[Sequence[int]]) -> list[Routes]:
    """Return the routes of rows of prompt and response, int16 [tokens - 1, layers, K] each.

    A record is that of a row if its tokens are the row's first ones. Tokens of a cached prefix had
    no pass: they have -1, as have rows without a record.
    """
    known = sorted(records, key=lambda each: -len(each["tokens"]))
    found: list[Routes | None] = []
    for row in rows:
        own = next((each for each in known if _is_of(each["tokens"], row)), None)
        found.append(None if own is None else _padded(own, len(row) - 1))
    form = next((each.shape[1:] for each in found if each is not None), (0, 0))
    return [
        np.full((len(row) - 1, *form), -1, np.int16) if own is None else own
        for row, own in zip(rows, found, strict=True)
    ]


def _is_of(tokens: Sequence[int], row: Sequence[int]) -> bool:
    return len(tokens) <= len(row) and all(
        token in (-1, own) for token, own in zip(tokens, row, strict=False)
    )


def _padded(record: Record, length: int) -> Routes:
    """Return the first `length` routes of a record, -1 where it has fewer."""
    values = np.frombuffer(base64.b64decode(record["routes"]), np.int16).reshape(record["shape"])
    routes = np.full((length, *values.shape[1:]), -1, np.int16)
    count = min(length, len(values))
    routes[:count] = values[:count]
    return routes
