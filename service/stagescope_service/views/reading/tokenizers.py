"""Texts of token ids, by the tokenizer that a run or the service names.

Only a `tokenizer.json` is read, which is data. A run names it with `init(settings={"tokenizer":
path})`, verl's plugin by its model's path; the setting `STAGESCOPE_TOKENIZER` serves all others.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer, decoders

from stagescope_service.settings import Settings
from stagescope_service.statistics.cell import Int64
from stagescope_service.store.artifacts import confine
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_wire.errors import StagescopeError

NO_TOKENIZER: Final = (
    "no tokenizer is known: give init(settings={'tokenizer': '/path/of/tokenizer.json'}), or the "
    "service STAGESCOPE_TOKENIZER"
)
BUNDLED: Final = "bundle:tokenizer.json"
"""Replaces the tokenizer's path in a bundle that holds the tokenizer."""
MAX_BYTES: Final = 128 << 20
_FILE: Final = "tokenizer.json"
_WORD: Final = "\u2581"
"""The character that SentencePiece writes for a space."""


class Tokenizers:
    """Texts of the ids of one tokenizer; without one, `reason` says why there are none."""

    def __init__(self, tokenizer: Tokenizer | None, reason: str | None) -> None:
        self._tokenizer = tokenizer
        self.reason = reason

    @classmethod
    def from_settings(cls, settings: Settings, meta: Mapping[str, object]) -> Tokenizers:
        """Return the tokenizer of a batch, by its `meta`, else the service's."""
        of_run = meta.get("settings")
        named = of_run.get("tokenizer") if isinstance(of_run, Mapping) else None
        try:
            path = tokenizer_path(settings, named)
            if path is None:
                return cls(None, NO_TOKENIZER)
            status = path.stat()
            if status.st_size > MAX_BYTES:
                return cls(None, f"{path} has {status.st_size} bytes, at most {MAX_BYTES} are read")
            return cls(_load(path, status.st_mtime_ns), None)
        except (OSError, StagescopeError) as error:
            return cls(None, f"the tokenizer cannot be read: {error}")
        except Exception as error:  # the library raises Exception itself for a malformed file
            return cls(None, f"the tokenizer of {named or settings.tokenizer} is damaged: {error}")

    @classmethod
    def of_attempt(cls, deps: Dependencies, attempt_id: int) -> Tokenizers:
        """Return the tokenizer that an attempt's processes name, else the service's."""
        found = deps.catalogue.settings_with(attempt_id, "tokenizer")
        # A bundle holds the run's tokenizer, and names its path on another machine.
        is_bundle = isinstance(getattr(deps.commands, "bundle", None), str)
        named = None if is_bundle else next((each["tokenizer"] for each in found), None)
        return cls.from_settings(deps.settings, {"settings": {"tokenizer": named}})

    def texts(self, ids: Int64 | Sequence[int]) -> list[str] | None:
        """Return the text of each id, spaces included; None without a tokenizer.

        A token that holds a part of a character only is shown with U+FFFD.
        """
        if self._tokenizer is None:
            return None
        by_id = {int(token): self._text(int(token)) for token in np.unique(np.asarray(ids))}
        return [by_id[int(token)] for token in ids]

    def text(self, ids: Int64) -> str | None:
        """Return ids as one text, special tokens included; None without a tokenizer.

        An id that the tokenizer does not know is shown as `<id>`, and is not left out.
        """
        texts = self.texts(ids)
        if self._tokenizer is None or texts is None:
            return None
        size = self._tokenizer.get_vocab_size()
        if all(0 <= token < size for token in ids):
            return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        return "".join(texts)

    def _text(self, token: int) -> str:
        assert self._tokenizer is not None
        name = self._tokenizer.id_to_token(token) if 0 <= token < 1 << 32 else None
        if name is None:
            return f"<{token}>"
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return str(decoders.ByteLevel().decode([name]))
        return str(name).replace(_WORD, " ")


def tokenizer_path(settings: Settings, named: object) -> Path | None:
    """Return the file of the tokenizer that a run names, else the service's; None: there is none.

    Raises:
        OSError, StagescopeError: the run's is not inside the allowed directories.
    """
    if isinstance(named, str) and named != BUNDLED:
        # A run may name any path: only those in the allowed directories are read.
        return confine(_file(Path(named)), settings.roots)
    return None if settings.tokenizer is None else _file(settings.tokenizer)


def _file(path: Path) -> Path:
    return path / _FILE if path.is_dir() else path


@functools.lru_cache(maxsize=4)
def _load(path: Path, _written: int) -> Tokenizer:
    return Tokenizer.from_file(str(path))
