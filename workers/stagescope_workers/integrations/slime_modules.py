"""slime and miles, its fork: where each has the functions that the integration touches."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from stagescope_workers.integrations import training, weights
from stagescope_workers.integrations.configuration import lookup
from stagescope_workers.integrations.patches import guarded

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Modules:
    """The modules of a package that are patched or read.

    Attributes:
        package: Its name.
        homes: Where its timers and training data are, the newest first.
        data: The module of `save_debug_train_data`, in one of `homes`.
        logs: Modules that may hold `log`; the first that exists is used, else the last.
        slices: The module of `slice_log_prob_with_cp`.
        parallel: The module of `get_parallel_state`; empty: Megatron's own state says the ranks.
        captures: Whether its loss captures the log-probs of the update's own pass.
    """

    package: str
    homes: tuple[str, ...]
    data: str
    logs: tuple[str, ...]
    slices: str
    parallel: str = ""
    captures: bool = False

    @property
    def actor(self) -> str:
        """The module of `MegatronTrainRayActor`."""
        return f"{self.package}.backends.megatron_utils.actor"

    @property
    def model(self) -> str:
        """The module that calls `get_batch`."""
        return f"{self.package}.backends.megatron_utils.model"

    @property
    def loss(self) -> str:
        """The module that captures log-probs."""
        return f"{self.package}.backends.megatron_utils.loss"

    @property
    def home(self) -> str:
        """The package of timers and training data, of the version that is installed."""
        return next(
            (each for each in self.homes if self._has(f"{each}.{self.data}")), self.homes[0]
        )

    @property
    def log(self) -> str:
        """The module of `log`, of the version that is installed."""
        return next((each for each in self.logs if self._has(each)), self.logs[-1])

    def _has(self, module: str) -> bool:
        """Return whether a module exists, without importing it."""
        if module in sys.modules:
            return True
        package, _, name = module.rpartition(".")
        found = importlib.util.find_spec(self.package)
        folders = [] if found is None else list(found.submodule_search_locations or ())
        parts = [*package.split(".")[1:], f"{name}.py"]
        return any(os.path.exists(os.path.join(folder, *parts)) for folder in folders)


SLIME: Final = Modules(
    "slime",
    homes=("slime.observability", "slime.utils"),  # since 2026-08-21, and before
    data="train_data_utils",
    logs=("slime.observability.logging_utils", "slime.utils.logging_utils"),
    slices="slime.backends.megatron_utils.cp_utils",
    captures=True,
)
MILES: Final = Modules(
    "miles",
    homes=("miles.utils",),
    data="train_dump_utils",
    logs=("miles.utils.tracking_utils.tracking",),
    slices="miles.backends.training_utils.cp_utils",
    parallel="miles.backends.training_utils.parallel",
)
_BY_PACKAGE: Final = {each.package: each for each in (SLIME, MILES)}


def of_module(name: str) -> Modules:
    """Return the modules of the package that a module belongs to."""
    return _BY_PACKAGE.get(name.partition(".")[0], SLIME)


def ranks(modules: Modules, layout: Mapping[str, int]) -> tuple[int | None, int | None]:
    """Return the data-parallel rank of this rank's rows, and of its tokens.

    Ranks of one context-parallel group have the same rows and other tokens of them. None: unknown.
    """
    parallel: ModuleType | None = sys.modules.get(modules.parallel)
    state: ModuleType | None = sys.modules.get("megatron.core.parallel_state")
    with guarded("the data-parallel rank"):
        if parallel is not None:
            own = parallel.get_parallel_state()
            rows = int(own.effective_dp.rank)
            return rows, rows * int(own.cp.size) + int(own.cp.rank)
        if state is not None and layout:
            tokens = int(state.get_data_parallel_rank(with_context_parallel=True))
            return int(state.get_data_parallel_rank()), tokens
    return None, None


def sliced(
    modules: Modules, args: object, batch: Mapping[str, Any], rows: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return this context-parallel rank's part of rows that are whole, one for each response."""
    slice_ = getattr(sys.modules.get(modules.slices), "slice_log_prob_with_cp", None)
    if slice_ is None or training.megatron_layout().get("cp_size", 1) == 1:
        return list(rows)
    form = lookup(args, "qkv_format") or "thd"
    found = []
    for number, row in enumerate(rows):
        lengths = (int(batch[name][number]) for name in ("total_lengths", "response_lengths"))
        # miles also pads rows to one length, and divides that length into parts.
        padded = () if form == "thd" else (form, int(batch["max_seq_lens"][number]))
        found.append(slice_(row, *lengths, *padded))
    return found


def statistics_settings(trainer: str, args: object) -> dict[str, object]:
    """Return the settings that the statistics depend on: which importance weights are applied."""
    if not weights.has(args, "use_tis"):
        return weights.not_known(trainer, "--use-tis")
    if not lookup(args, "use_tis"):
        return {}
    custom = lookup(args, "custom_tis_function_path")
    if custom and not str(custom).endswith("icepop_function"):
        return weights.not_computed(trainer, f"its custom_tis_function_path is {custom}")
    return weights.applied(
        trainer,
        "token",
        "zero" if custom else "cut",
        low=lookup(args, "tis_clip_low"),
        high=lookup(args, "tis_clip"),
    )
