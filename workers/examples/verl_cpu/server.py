"""The engine as a rollout backend of verl, named `transformers`, through verl's own registries.

verl's configuration names this module as `actor_rollout_ref.model.external_lib`: verl imports it
where it reads a model's configuration, before it looks for a rollout backend.

* `Server` is a Ray actor around one engine, as a vLLM or SGLang server is;
* `Replica` starts it (`RolloutReplicaRegistry`), for `LLMServerManager`;
* `ServerAdapter` lives in each training worker and hands it the weights.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

import ray
import torch
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from examples.verl_cpu.engine import Engine

NAME: Final = "transformers"


def _actor_name(replica_rank: int) -> str:
    return f"{NAME}_server_{replica_rank}"


class Server:
    """One engine that answers one request after the other."""

    def __init__(self, model_path: str, seed: int) -> None:
        self._engine = Engine(model_path, seed)

    def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: object
    ) -> TokenOutput:
        """Generate as verl's servers do; media arguments are ignored."""
        generation = self._engine.generate(
            prompt_ids, sampling_params["max_tokens"], sampling_params["seed"]
        )
        return TokenOutput(
            token_ids=generation.token_ids,
            log_probs=generation.log_probs,
            stop_reason=generation.stop_reason,
            extra_fields={"global_steps": self._engine.version},
        )

    def update_weights(self, weights: Mapping[str, torch.Tensor], global_steps: int | None) -> None:
        """Replace the weights by those of the trainer's step."""
        self._engine.load(weights, global_steps)

    def sleep(self) -> None:
        """Free the weights while the trainer works."""
        self._engine.unload()


class Replica(RolloutReplica):  # type: ignore[misc]
    """Starts one server."""

    async def launch_servers(self) -> None:
        """Start the server."""
        remote: Any = ray.remote(num_cpus=0)
        name = _actor_name(self.replica_rank)
        server = remote(Server).options(name=name)
        self._server_handle = server.remote(self.model_config.path, self.config.seed)
        self._server_address = name
        self.servers = [self._server_handle]

    async def start_profile(self, **kwargs: object) -> None:
        """The engine has no profiler."""

    async def stop_profile(self) -> None:
        """The engine has no profiler."""


class ServerAdapter(base.BaseRollout):  # type: ignore[misc]
    """Hands the training workers' weights to the server of their replica."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: `update_weights` sends all weights."""

    async def release(self) -> None:
        """Do nothing: the replica puts the server to sleep."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        **_: object,
    ) -> None:
        """Gather the weights (all ranks together) and send them in the engine's dtype."""
        gathered = {name: tensor.to(torch.bfloat16) for name, tensor in weights}
        replica, rank = divmod(int(os.environ["RANK"]), self.config.tensor_model_parallel_size)
        if rank == 0:
            server: Any = ray.get_actor(_actor_name(replica))
            await server.update_weights.remote(gathered, global_steps)


RolloutReplicaRegistry.register(NAME, lambda: Replica)
base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.{ServerAdapter.__name__}"
