"""Files that are whole or not there: a temporary file replaces the path at the end."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stagescope_wire.errors import InvalidInput, StoreError


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block succeeds.

    Raises:
        InvalidInput: `path` is not a file (a directory, a device), or its directory does not exist;
            it is not created, because its name may be mistyped.
        StoreError: the file cannot be written.
    """
    if path.exists() and not path.is_file():
        # Replacing it would delete it, even /dev/null if this user may.
        raise InvalidInput(f"{path} exists and is not a file", expected="the path of a file")
    if not path.parent.is_dir():
        raise InvalidInput(
            f"the directory {path.parent} does not exist",
            expected="an existing directory",
            advice="create it, or correct the path",
        )
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror or error}", advice="check its directory and its disk"
        ) from error
