"""Faults in a vLLM server; they run inside its processes and import nothing of ours.

`Faults` is the worker's `worker_extension_cls`, called by `/collective_rpc`. Each method sets a
fault or, with its default arguments, reverts it. `Tokenizer` is a `--middleware` of the API server.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import torch


class Faults:
    """What vLLM's worker inherits; names must not be those of its own methods."""

    model_runner: Any
    reload_weights: Callable[..., None]
    _fault_set_active_loras: Callable[..., None] | None = None
    _fault_sampling: tuple[float | None, float] | None = None

    def fault_load_weights(self, path: str) -> None:
        """Load all weights, the experts in the kernel's layout: what `reload_weights` forgets."""
        self.reload_weights(weights_path=path)
        with torch.no_grad():
            for module in self._fault_model().modules():
                kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
                if kernel is not None and hasattr(module, "w13_weight"):
                    kernel.fused_experts.process_weights_after_loading(module)

    def fault_positions(self, by: int = 0, first: int = 0, decode: bool = False) -> None:
        """Shift rotary positions from `first` on, in each forward or only while decoding.

        Rotary positions are relative: a shift of all positions changes nothing.
        """
        from vllm.forward_context import (  # pyright: ignore[reportMissingImports]
            get_forward_context,
        )

        def shift(positions: torch.Tensor) -> torch.Tensor:
            moved = positions + by * (positions >= first)
            if not decode:
                return moved
            metadata = get_forward_context().attn_metadata
            each = next(iter(metadata.values())) if isinstance(metadata, dict) else metadata
            if each is None:
                return positions
            starts = each.query_start_loc
            lengths = torch.repeat_interleave(starts.diff(), starts.diff())
            single = torch.zeros_like(positions, dtype=torch.bool)
            single[: len(lengths)] = lengths == 1
            return torch.where(single, moved, positions)

        for module in self._fault_modules("rotary_emb"):
            module.__dict__.pop("forward", None)
            if by:
                own = module.forward
                module.forward = lambda positions, *rest, own=own: own(shift(positions), *rest)

    def fault_head(self, dtype: str | None = None) -> None:
        """Compute the logits in another dtype, as `head_dtype` does; None: the model's own."""
        model = self._fault_model()
        own = self.model_runner.model_config.dtype
        model.logits_processor.head_dtype = getattr(torch, dtype) if dtype else own

    def fault_sampler(
        self,
        mode: str = "raw_logprobs",
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> None:
        """Return raw or processed log-probs; sample with other settings than requested."""
        sampler = self.model_runner.sampler
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = mode
        sampler.__dict__.pop("apply_temperature", None)
        own = sampler.apply_temperature

        def apply(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
            logits = own(logits, *rest) if temperature is None else logits.div_(temperature)
            values, order = logits.sort(dim=-1, descending=True)
            before = values.softmax(-1).cumsum(-1).roll(1, -1)
            before[:, 0] = 0.0
            cut = before >= top_p
            cut[:, top_k or logits.shape[-1] :] = True
            return logits.masked_fill_(cut.scatter(-1, order, cut), -torch.inf)

        if temperature is not None or top_k or top_p < 1.0:
            sampler.apply_temperature = apply

    def fault_base_for_adapters(self, on: bool = False) -> None:
        """Serve requests for an adapter with the base alone."""
        runner = self.model_runner
        runner.__dict__.pop("_set_active_loras", None)
        if on:
            own = runner._set_active_loras
            runner._set_active_loras = lambda prompt, token, requests, *rest: own(
                (0,) * len(prompt), (0,) * len(token), requests, *rest
            )

    def _fault_model(self) -> Any:
        return self.model_runner.get_model()

    def _fault_modules(self, name: str) -> list[Any]:
        named = self._fault_model().named_modules(remove_duplicate=True)
        return [module for path, module in named if path.rpartition(".")[2] == name]


class Tokenizer:
    """Adds a BOS in front of every text while the last `POST /fault_bos` had the body `1`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._adds_bos = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] == "/fault_bos":
            self._adds_bos = bool(json.loads(body))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        if self._adds_bos and body.startswith(b"{"):
            fields = json.loads(body)
            if isinstance(fields.get("prompt"), str):
                body = json.dumps(fields | {"prompt": "<s>" + fields["prompt"]}).encode()
                headers = [each for each in scope["headers"] if each[0] != b"content-length"]
                headers.append((b"content-length", str(len(body)).encode()))
                scope = scope | {"headers": headers}
        sent = False

        async def replay() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)
