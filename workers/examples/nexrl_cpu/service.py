"""NexRL's train service in the trainer's process: its own client, worker and actor, no sockets.

`Client` is NexRL's client up to the point where it would send a batch to the ranks. `Worker` is the
rank's `ModelWorker` with a small model. `prepare` replaces the parts that need a GPU.
"""

# NexRL is not installed where this is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers.utils
from tensordict import TensorDict

from examples.countdown.model import make_policy


def prepare() -> None:
    """Replace what NexRL expects of a GPU, and of Python 3.12. Call it before NexRL is imported."""
    if sys.version_info < (3, 12):
        _replace(typing, "override", lambda function: function)
        # Its f-string is of Python 3.12; Weaver is NexRL's remote API mode.
        _pretend("nexrl.weaver.weaver_service_holder", WeaverServiceHolder=object)
    # Called with `use_remove_padding` alone.
    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    _pretend("flash_attn")
    _pretend("flash_attn.bert_padding", **dict.fromkeys(names))
    if not hasattr(transformers.utils, "is_remote_url"):  # gone in transformers 5
        _replace(transformers.utils, "is_remote_url", lambda _: False)
    _replace(TensorDict, "cuda", lambda batch, *_, **__: batch)
    _replace(torch.cuda.memory, "_set_allocator_settings", lambda _: None)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def _replace(holder: object, name: str, function: Callable[..., object]) -> None:
    setattr(holder, name, function)


def _pretend(name: str, **content: object) -> None:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(content)


def install() -> None:
    """Have NexRL's factory of clients make `Client`."""
    from nexrl.train_service_backend.api import direct_zmq_client
    from nexrl.train_service_backend.fsdp_worker import fsdp_workers
    from nexrl.train_service_backend.utils.protocol import DataProto
    from torch.distributed.device_mesh import init_device_mesh

    def mesh(world_size: int, fsdp_size: int) -> object:
        return init_device_mesh("cpu", mesh_shape=(world_size,), mesh_dim_names=("fsdp",))

    fsdp_workers.create_device_mesh = mesh
    DataProto.to = lambda data, _: data
    direct_zmq_client.DirectZMQTrainServiceClient = _client_class()


_workers: dict[str, Any] = {}
"""Workers by the service's identifier, which all of its clients share."""
_versions: list[int] = [0]


def policy() -> tuple[int, dict[str, np.ndarray]]:
    """Return the number of the weights that the engine should have, and the weights."""
    (worker,) = _workers.values()
    state = worker.actor_module_fsdp.state_dict()
    return _versions[0], {name: value.detach().numpy() for name, value in state.items()}


def _worker_class() -> type:
    from nexrl.train_service_backend.fsdp_worker.fsdp_workers import ModelWorker
    from nexrl.train_service_backend.utils import model_utils

    class Worker(ModelWorker):  # type: ignore[misc]
        """NexRL's worker of a rank, with the policy of `examples.countdown`."""

        def _build_model_optimizer(self, *, optim_config: Any, **_: object) -> tuple[object, ...]:
            self.tokenizer = None
            module: Any = make_policy(0)
            wrapped = _as_fsdp(module)
            optimizer = torch.optim.AdamW(wrapped.parameters(), lr=float(optim_config.lr))
            scheduler = model_utils.get_constant_schedule_with_warmup(optimizer, 0)
            return wrapped, optimizer, scheduler, module.config

        def save_checkpoint(self, local_path: str, **_: object) -> None:
            """Save the weights that the engine loads."""
            Path(local_path).mkdir(parents=True, exist_ok=True)
            torch.save(self.actor_module_fsdp.state_dict(), Path(local_path) / "weights.pt")
            _versions[0] += 1

    return Worker


def _as_fsdp(module: torch.nn.Module) -> torch.nn.Module:
    """Wrap the model as NexRL does, `use_orig_params=False` included."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    return FullyShardedDataParallel(
        module,
        use_orig_params=False,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
    )


def _client_class() -> type:
    from nexrl.train_service_backend.api.direct_zmq_client import DirectZMQTrainServiceClient
    from omegaconf import OmegaConf

    class Client(DirectZMQTrainServiceClient):  # type: ignore[misc]
        """NexRL's client; a batch goes to the worker of this process, pickled as on the wire."""

        def initialize_worker(self, *, config_dict: Any, **_: object) -> dict[str, object]:
            config = OmegaConf.create(config_dict["actor"])
            _workers[str(self.identifier)] = _worker_class()(config)
            return {"status": "success"}

        def init_model(self) -> dict[str, object]:
            _workers[str(self.identifier)].init_model()
            return {"status": "success"}

        def _scatter_to_workers(self, operation: str, data: Any) -> Any:
            worker = _workers[str(self.identifier)]
            return getattr(worker, operation)(pickle.loads(pickle.dumps(data)))

        @contextlib.contextmanager
        def actor_context(self) -> Iterator[None]:
            yield

        def save_checkpoint(self, local_path: str, **options: object) -> dict[str, object]:
            _workers[str(self.identifier)].save_checkpoint(local_path, **options)
            return {"status": "success"}

    return Client
