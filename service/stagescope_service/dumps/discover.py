"""Finding out whose dump a directory or file is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from stagescope.errors import InvalidInput, NotFound
from stagescope_service.dumps import nexrl, own
from stagescope_service.dumps.listing import files_below
from stagescope_service.dumps.records import Dump

_Opener = Callable[..., Dump]
_OPENERS: Final[dict[str, _Opener]] = {own.KIND: own.open_own, nexrl.KIND: nexrl.open_nexrl}
_RECOGNISE: Final[dict[str, Callable[[Sequence[str]], bool]]] = {
    own.KIND: own.holds_own,
    nexrl.KIND: nexrl.is_nexrl,
}
_LOOKS: Final[dict[str, str]] = {
    own.KIND: "kept files of stagescope (step_N/STAGE/ROLE_rankR_*.safetensors)",
    nexrl.KIND: "NexRL's (forward_data/step_000000_rank0_micro0.pt, ...)",
}


def open_dump(path: Path, *, step: int | None = None, kind: str | None = None) -> Dump:
    """Open a directory or file of dumps, whosever it is.

    Args:
        path: a directory, or a file of a format that has one file.
        step: only this step.
        kind: the format, one of `KINDS`; None finds out.

    Raises:
        NotFound: there is no such path, or nothing in it is of a known format.
        InvalidInput: an unknown kind, or files of several formats.
        TooLarge: more files than a dump has.
        StoreError: the disk refused.
    """
    if not path.exists():
        raise NotFound(f"there is no directory or file {path}")
    if kind is None:
        kind = _kind_of(path)
    if kind not in _OPENERS:
        raise InvalidInput(f"kind {kind!r} is not known", expected=f"one of {', '.join(KINDS)}")
    return _OPENERS[kind](path, step=step)


def _kind_of(path: Path) -> str:
    found, _ = files_below(path)
    names = [each.name for each in found]
    kinds = [kind for kind, is_of in _RECOGNISE.items() if is_of(names)]
    if len(kinds) > 1:
        raise InvalidInput(
            f"{path} holds dumps of several formats: {', '.join(kinds)}",
            expected="one",
            advice="name it (kind), or give the directory of one",
        )
    if not kinds:
        raise NotFound(
            f"{path} holds no dump of a known format ({len(names)} files)",
            expected="; ".join(_LOOKS.values()),
        )
    return kinds[0]


KINDS: Final = tuple(_OPENERS)
