"""NexRL's `debug:` block, as its `DataDumper` has read it, and WEAVER_DEBUG_DUMP_*.

The service also keeps the data that the block dumps, at the same steps. NexRL's own files are the
same as without stagescope. The WEAVER_DEBUG_DUMP variables belong to Weaver, a closed trainer
behind an API. It writes its files itself, and `stagescope import` reads them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Final

SELF_HOSTED: Final = ("trajectory", "old_log_probs", "forward_data", "loss", "param", "gradient")
"""NexRL's `dump_options`."""
REMOTE_API: Final = ("prepared_trajectories", "datums", "training_metrics")
"""NexRL's `remote_api_dump_options`."""
WEAVER: Final = ("forward_data", "loss", "is_loss_debug", "batch_inputs", "param", "gradient")
"""Weaver's WEAVER_DEBUG_DUMP_OPTIONS, which are the names of its directories."""
_SHARDS: Final = ("param", "gradient")
_WEAVER_VARIABLE: Final = "WEAVER_DEBUG_DUMP_"
_DEFAULT_WEAVER_DIRECTORY: Final = "./weaver_debug_dump"


@dataclasses.dataclass(frozen=True)
class DebugBlock:
    """The `debug:` block of a configuration.

    Attributes:
        directory: `dump_dir`, its interpolations resolved.
        format: `dump_format`.
        every_n_steps: `dump_every_n_steps`.
        types: The names of SELF_HOSTED and REMOTE_API that are switched on.
        pattern: `target_param_pattern`.
    """

    directory: str
    format: str
    every_n_steps: int
    types: tuple[str, ...]
    pattern: str

    def keep(self) -> dict[str, object] | None:
        """Return what the service keeps of a run with this block: `init`'s `keep`."""
        what = [name for name in self.types if name not in _SHARDS]
        return {"every_n_steps": self.every_n_steps, "what": what} if what else None

    def settings(self) -> dict[str, object]:
        """Return the block by NexRL's names, for the attempt's fingerprint."""
        return {
            "enable_data_dump": True,
            "dump_dir": self.directory,
            "dump_format": self.format,
            "dump_every_n_steps": self.every_n_steps,
            "types": list(self.types),
            "target_param_pattern": self.pattern,
        }

    def lines(self) -> list[str]:
        """Return the lines that tell a user about it."""
        names = ", ".join(self.types) or "none of the options is on"
        lines = [
            f"NexRL still writes its own dumps: {names}, every {self.every_n_steps} steps, to "
            f"{os.path.abspath(self.directory)} ({self.format}). The service keeps the same data, "
            "without their gaps"
        ]
        shards = [name for name in self.types if name in _SHARDS]
        if shards:
            lines.append(
                f"dump_options {' and '.join(shards)}: NexRL 1.4 builds FSDP with "
                f"use_orig_params=False, where no parameter is called {self.pattern!r}. It writes "
                "no such file, and does not say so"
            )
        return lines


def read_dumper(dumper: Any) -> DebugBlock | None:
    """Return the block that a `DataDumper` has read; None where it dumps nothing."""
    if not getattr(dumper, "_enabled", False):
        return None
    options = {
        **(getattr(dumper, "_options", None) or {}),
        **(getattr(dumper, "_remote_api_options", None) or {}),
    }
    return DebugBlock(
        directory=str(dumper._dump_dir),
        format=str(dumper._format),
        every_n_steps=int(dumper._dump_every_n),
        types=tuple(name for name in (*SELF_HOSTED, *REMOTE_API) if options.get(name)),
        pattern=str(getattr(dumper, "_target_param_pattern", "") or ""),
    )


@dataclasses.dataclass(frozen=True)
class WeaverDump:
    """The WEAVER_DEBUG_DUMP variables of this process.

    Attributes:
        directory: Where Weaver's trainer writes, on its own host.
        every_n_steps: WEAVER_DEBUG_DUMP_EVERY_N.
        options: WEAVER_DEBUG_DUMP_OPTIONS.
        problems: Why some of them cannot be read.
    """

    directory: str
    every_n_steps: int
    options: tuple[str, ...]
    problems: tuple[str, ...]

    def settings(self) -> dict[str, object]:
        """Return them for the attempt's fingerprint."""
        return {
            "directory": self.directory,
            "every_n_steps": self.every_n_steps,
            "options": list(self.options),
        }

    def lines(self, run: str) -> list[str]:
        """Return the lines that tell a user about them."""
        return [
            *self.problems,
            f"{_WEAVER_VARIABLE}*: Weaver's trainer writes {', '.join(self.options) or 'nothing'} "
            f"every {self.every_n_steps} steps to {self.directory} on its own host, which "
            f"this process cannot read. `stagescope import {self.directory} --run {run}-weaver` "
            "imports them, and `stagescope compare-dumps` compares them with NexRL's",
        ]


def read_weaver(environ: Mapping[str, str]) -> WeaverDump | None:
    """Return what WEAVER_DEBUG_DUMP_{ENABLED,DIR,EVERY_N,OPTIONS} say; None where not enabled."""

    def value(name: str, default: str) -> str:
        return environ.get(f"{_WEAVER_VARIABLE}{name}", "").strip() or default

    if value("ENABLED", "0").lower() in ("0", "false", "no", "off"):
        return None
    problems = []
    every = value("EVERY_N", "1")
    if not (every.isdecimal() and int(every) > 0):
        problems.append(f"{_WEAVER_VARIABLE}EVERY_N={every}: expected a number from 1")
        every = "1"
    given = [word.strip() for word in value("OPTIONS", "").split(",") if word.strip()]
    unknown = [word for word in given if word not in WEAVER]
    if unknown:
        problems.append(
            f"{_WEAVER_VARIABLE}OPTIONS: {', '.join(unknown)} is none of {', '.join(WEAVER)}"
        )
    return WeaverDump(
        directory=value("DIR", _DEFAULT_WEAVER_DIRECTORY),
        every_n_steps=int(every),
        options=tuple(word for word in given if word in WEAVER),
        problems=tuple(problems),
    )
