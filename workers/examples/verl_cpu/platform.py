"""Lets verl train without an accelerator; loaded by `VERL_USE_EXTERNAL_MODULES`.

`CpuPlatform` is added to verl's registry of devices (`PlatformRegistry`). Four other
functions of verl assume an accelerator and are patched here, in every process that imports verl:

* `torch.distributed.init_process_group`: verl passes "cpu:gloo,cpu:gloo", torch accepts one backend
  per device;
* the critic's loader requests flash attention, whatever the configuration is;
* the reference model is offloaded into pinned memory, which needs an accelerator;
* `ResourcePoolManager` counts GPUs or NPUs before it requests the platform's own resource from Ray.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.single_controller.ray.base import ResourcePoolManager


def _device_module() -> types.ModuleType:
    """Return `torch.cpu` with the other functions of `torch.cuda` that verl calls."""
    module = types.ModuleType("cpu_device")
    vars(module).update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    vars(module).update(
        empty_cache=lambda: None,
        get_device_name=lambda *_: "CPU",
        get_rng_state=torch.get_rng_state,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        mem_get_info=lambda *_: (0, 0),
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        set_device=lambda *_: None,
        set_rng_state=torch.set_rng_state,
    )
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """The CPU as a device of verl; a rank uses one of Ray's CPU slots."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        """Every host has one."""
        return True

    def current_device(self) -> str:
        """Return the argument of `tensor.to()`; an index would mean an accelerator."""
        return "cpu"

    def device_count(self) -> int:
        """One: there is no choice."""
        return 1

    def set_device(self, device_index: int) -> None:
        """There is no choice."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs ahead of the host."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generator."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The host's allocator has none."""

    def empty_cache(self) -> None:
        """The host's allocator has no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """A CPU has no CUDA capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return the one backend for tensors on the host."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return a name that has no effect."""
        return "CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """There is no device profiler."""
        yield

    def profiler_start(self) -> None:
        """There is no device profiler."""

    def profiler_stop(self) -> None:
        """There is no device profiler."""

    def ray_resource_name(self) -> str:
        """Return a resource that every Ray cluster has."""
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, object]:
        """Request a rank's share of its CPU slot."""
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        """Ray hides no CPU from a worker."""
        return []

    def is_ipc_supported(self) -> bool:
        """There is no device memory to share."""
        return False

    def cudart(self) -> None:
        """There is no CUDA runtime."""


def _one_backend_a_device() -> None:
    original = torch.distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        pairs = backend.split(",") if backend else []
        return original(",".join(dict.fromkeys(pairs)) or None, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _critic_without_flash_attention() -> None:
    original = transformers.AutoModelForTokenClassification.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> object:
        torch.manual_seed(0)  # its value head is new, and must be equal in every start
        return original(*args, **{**kwargs, "attn_implementation": "sdpa"})

    transformers.AutoModelForTokenClassification.from_pretrained = from_pretrained  # type: ignore[method-assign]


def _pinned_memory_is_memory() -> None:
    def pin_memory(self: torch.Tensor, device: object = None) -> torch.Tensor:
        return self

    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment, method-assign]


def _ray_counts_the_slots() -> None:
    # Ray waits for the placement group anyhow.
    ResourcePoolManager._check_resource_available = lambda _: None


_one_backend_a_device()
_critic_without_flash_attention()
_pinned_memory_is_memory()
_ray_counts_the_slots()
