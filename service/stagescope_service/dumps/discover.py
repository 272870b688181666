"""Detecting the format of a dump."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from stagescope_service.dumps.formats import (
    areal,
    msprobe_directory,
    nemo_rl,
    nexrl,
    own,
    prime_rl,
    prime_rl_traces,
    saved_batch,
    slime,
    verl_jsonl,
)
from stagescope_service.dumps.formats.content import damage_of
from stagescope_service.dumps.formats.listing import ListedFile, files_of, rank_dumps
from stagescope_service.dumps.records import Dump, Location
from stagescope_wire.errors import InvalidInput, NotFound


class Format(NamedTuple):
    """One format: how to open it, how to detect it, and what its files look like."""

    open: Callable[..., Dump]
    holds: Callable[[Sequence[ListedFile]], bool]
    layout: str


FORMATS: Final[dict[str, Format]] = {
    own.KIND: Format(
        own.open_own, own.holds_own, "stagescope's (step_N/STAGE/ROLE_rankR_*.safetensors)"
    ),
    nexrl.KIND: Format(
        nexrl.open_nexrl, nexrl.holds_nexrl, "NexRL's (forward_data/step_000000_rank0_micro0.pt)"
    ),
    saved_batch.KIND: Format(
        saved_batch.open_batch, saved_batch.holds_batch, "a batch (stagescope batch --output FILE)"
    ),
    slime.KIND: Format(
        slime.open_slime, slime.holds_slime, "slime's debug rollout and train data (*.pt)"
    ),
    areal.KIND: Format(areal.open_areal, areal.holds_areal, "AReaL's saved batches (*.pt)"),
    nemo_rl.KIND: Format(
        nemo_rl.open_nemo_rl, nemo_rl.holds_nemo_rl, "NeMo-RL's (train_data_stepN.jsonl)"
    ),
    prime_rl.KIND: Format(
        prime_rl.open_prime_rl,
        prime_rl.holds_prime_rl,
        "prime-rl's (token_exports/step_N/rank_R.jsonl)",
    ),
    prime_rl_traces.KIND: Format(
        prime_rl_traces.open_prime_rl_traces,
        prime_rl_traces.holds_prime_rl_traces,
        "prime-rl's traces (monitors/file/traces/annotations/trainer)",
    ),
    verl_jsonl.KIND: Format(
        verl_jsonl.open_verl, verl_jsonl.holds_verl, "verl's generations (STEP.jsonl)"
    ),
    msprobe_directory.KIND: Format(
        msprobe_directory.open_msprobe,
        msprobe_directory.holds_msprobe,
        "msprobe's (stepN/rankR/dump.json)",
    ),
}  # fmt: skip
KINDS: Final = tuple(FORMATS)
_DETECTED_BY_NAME: Final = (own.KIND, nexrl.KIND)
"""Detected by file names alone; files are opened only if neither of these is found."""


def open_dump(path: Path, *, step: int | None = None, kind: str | None = None) -> Dump:
    """Open a directory or file of dumps of any known format; no tensor is read.

    Args:
        path: a directory, or one file.
        step: only this step.
        kind: the format, one of `KINDS`; None detects it.

    Raises:
        NotFound: there is no such path, or it has no known format or no such step.
        InvalidInput: an unknown kind, or files of several formats.
        InvalidTensor: `path` is one damaged file, so that its format cannot be detected.
        TooLarge: more than `listing.MAX_FILES` files.
        StoreError: the disk reported an error.
    """
    if not path.exists():
        raise NotFound(f"there is no directory or file {path}")
    kind = kind or _detect_kind(path)
    if kind not in FORMATS:
        raise InvalidInput(f"kind {kind!r} is not known", expected=f"one of {', '.join(KINDS)}")
    dump = FORMATS[kind].open(path, step=step)
    if step is not None and not _locations(dump):
        steps = sorted(
            {each.step for each in _locations(FORMATS[kind].open(path)) if each.step is not None}
        )
        raise NotFound(
            f"{path} holds nothing of step {step}",
            expected=f"one of its steps: {', '.join(map(str, steps[:20])) or 'it says none'}",
        )
    return dump


def _locations(dump: Dump) -> list[Location]:
    """Return the places of a dump's entries and of its statistics of operators."""
    ranks = rank_dumps(dump)
    return [*(each.location for each in dump.entries), *(each.location for each in ranks)]


def _detect_kind(path: Path) -> str:
    found, _ = files_of(path.absolute())
    kinds = [kind for kind in _DETECTED_BY_NAME if FORMATS[kind].holds(found)]
    if not kinds:
        kinds = [
            kind for kind in KINDS if kind not in _DETECTED_BY_NAME and FORMATS[kind].holds(found)
        ]
    if len(kinds) > 1:
        raise InvalidInput(
            f"{path} holds dumps of several formats: {', '.join(kinds)}",
            expected="one",
            advice="name it (kind), or give the directory of one",
        )
    if not kinds:
        if path.is_file() and (error := damage_of(path)) is not None:
            raise error
        raise NotFound(
            f"{path} holds no dump of a known format ({len(found)} files)",
            expected="; ".join(each.layout for each in FORMATS.values()),
        )
    return kinds[0]
