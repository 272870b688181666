"""Real vLLM servers, each started when the first test asks for it, and shared by all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.engines.tiny_qwen import (
    Kind,
    merged,
    scaled,
    trained,
    write_adapter,
    write_qwen,
    write_variant,
)
from tests.support.engines.vllm_server import VllmServer, serving


@dataclasses.dataclass(frozen=True)
class Folders:
    """Model directories of one kind: what a server serves, and what a trainer may have.

    Attributes:
        base: what the servers start with.
        updated: all matrices after an update.
        one_old: as `updated`, but one layer's down_proj (or experts) are those of `base`.
        scaled: as `base`, but one expert (dense: one down_proj) is multiplied by 1.05.
        adapter: a LoRA adapter of `base`.
        merged: `base` with the adapter added: what a trainer of the adapter computes with.
    """

    base: Path
    updated: Path
    one_old: Path
    scaled: Path
    adapter: Path
    merged: Path


def _write(folder: Path, kind: Kind) -> Folders:
    base = write_qwen(folder / "base", kind)
    adapter = write_adapter(base, folder / "adapter")
    old, expert = "layers.1.mlp.down_proj", "layers.1.mlp.down_proj"
    if kind == "moe":
        old, expert = "layers.1.self_attn.o_proj", "layers.1.mlp.experts.3."
    return Folders(
        base=base,
        updated=write_variant(base, folder / "updated", trained()),
        one_old=write_variant(base, folder / "one-old", trained(without=old)),
        scaled=write_variant(base, folder / "scaled", scaled({expert: 1.05})),
        adapter=adapter,
        merged=write_variant(base, folder / "merged", merged(adapter)),
    )


@pytest.fixture(scope="session")
def dense_folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Directories of the dense model."""
    return _write(tmp_path_factory.mktemp("dense"), "dense")


@pytest.fixture(scope="session")
def moe_folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Directories of the MoE model."""
    return _write(tmp_path_factory.mktemp("moe"), "moe")


Start = Callable[[Folders, str, bool], VllmServer]


@pytest.fixture(scope="session")
def _start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with contextlib.ExitStack() as servers:

        def start(folders: Folders, dtype: str, lora: bool) -> VllmServer:
            log = tmp_path_factory.mktemp("vllm") / "log"
            adapter = folders.adapter if lora else None
            return servers.enter_context(serving(folders.base, log, dtype=dtype, adapter=adapter))

        yield start


@pytest.fixture(scope="session")
def dense(_start: Start, dense_folders: Folders) -> VllmServer:
    """The dense model in bfloat16, with an adapter and a prefix cache."""
    return _start(dense_folders, "bfloat16", True)


@pytest.fixture(scope="session")
def dense32(_start: Start, dense_folders: Folders) -> VllmServer:
    """The dense model in float32, with an adapter and a prefix cache."""
    return _start(dense_folders, "float32", True)


@pytest.fixture(scope="session")
def moe(_start: Start, moe_folders: Folders) -> VllmServer:
    """The MoE model in bfloat16; with an adapter it would need Triton."""
    return _start(moe_folders, "bfloat16", False)
