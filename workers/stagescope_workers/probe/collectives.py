"""The collectives that this process recorded, of torch.distributed's flight recorder.

The background thread takes them while the training thread hangs in one. torch is used only if the
training has imported it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from stagescope_wire.collectives.records import NONE, RankRecord, parse, recorded
from stagescope_wire.nonfinite import JsonObject

_log = logging.getLogger("stagescope.workers")

_DUMPS: Final[Mapping[str, tuple[str, ...]]] = {
    "torch._C._distributed_c10d": ("fr", "nccl"),
    "torch_npu._C._distributed_c10d": ("hccl",),
}
"""Module -> its recorders: of gloo and others, of NCCL, of HCCL."""


def collect_collectives() -> RankRecord | None:
    """Return the newest collectives of this process; None: it has none or they cannot be read."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return None
    try:
        if not c10d.is_initialized():
            return RankRecord(NONE)
        return recorded(
            _documents(), rank=c10d.get_rank(), ranks=_ranks_of_groups(c10d), now_ns=time.time_ns()
        )
    except Exception as error:  # torch's own structures may change
        _log.warning("the collectives of this process cannot be read: %r", error)
        return None


def _documents() -> list[JsonObject]:
    found = []
    for module, recorders in _DUMPS.items():
        owner = sys.modules.get(module) or _attribute(module)
        for name in recorders:
            with contextlib.suppress(AttributeError):
                found.append(parse(_dump(owner, name)))
    return found


def _attribute(path: str) -> Any:
    """Return a module that is an attribute and not in `sys.modules`, such as of torch._C."""
    first, *rest = path.split(".")
    owner: Any = sys.modules.get(first)
    for name in rest:
        owner = getattr(owner, name, None)
    return owner


def _dump(owner: Any, name: str) -> bytes:
    """Return a recorder's dump.

    Raises:
        AttributeError: this build has no such recorder.
    """
    as_json: Callable[[], bytes] | None = getattr(owner, f"_dump_{name}_trace_json", None)
    if as_json is not None:
        return as_json() or b'{"entries": []}'
    dump = getattr(owner, f"_dump_{name}_trace")
    try:
        return bytes(dump(includeStackTraces=False))
    except TypeError:  # older releases
        return bytes(dump())


def _ranks_of_groups(c10d: Any) -> dict[str, list[int]]:
    world = c10d._world
    # Groups that this rank is not in are all one there, without a name.
    return {
        name: [*world.pg_group_ranks.get(group, ())] for group, name in [*world.pg_names.items()]
    }
