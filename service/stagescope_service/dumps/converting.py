"""Rewrites .pt files as safetensors and JSON, which the readers accept in their place.

Only files that `read_torch_file` can read are rewritten: no code of a file ever runs.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from stagescope_service.dumps.formats.content import write_content
from stagescope_service.dumps.formats.listing import files_of
from stagescope_service.dumps.pickles.torch_file import read_torch_file
from stagescope_service.store.tensorfile import disk_errors
from stagescope_wire.errors import Conflict, InvalidInput, NotFound, StagescopeError


@dataclasses.dataclass
class Conversion:
    """The outcome of a conversion: the number of files written, and why others were not."""

    written: int = 0
    failed: dict[Path, str] = dataclasses.field(default_factory=dict)


def convert_files(source: Path, target: Path) -> Conversion:
    """Write each file of `source` below `target`.

    `X.pt` becomes `X.json` with `X.safetensors` beside it. Other files are copied.

    Args:
        source: a file, or a directory with everything below it.
        target: a directory that is empty or does not exist.

    Raises:
        NotFound: no such file or directory, or no .pt file in it.
        Conflict: `target` is not empty.
        InvalidInput: `target` lies in `source`.
        TooLarge: more than `listing.MAX_FILES` files.
        StoreError: the disk reported an error.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Conflict(f"{target} exists and is not empty", expected="a new directory")
    if source.is_dir() and target.resolve().is_relative_to(source.resolve()):
        raise InvalidInput(f"{target} lies in {source}", expected="a directory elsewhere")
    found, problems = files_of(source)
    done = Conversion(failed={each.path: each.message for each in problems})
    paths = [each.path for each in found]
    if not done.failed and not any(path.suffix == ".pt" for path in paths):
        raise NotFound(f"{source} holds no .pt file", expected="files that torch.save wrote")
    root = source if source.is_dir() else source.parent
    for path in paths:
        output = target / path.relative_to(root)
        try:
            with disk_errors(output):
                output.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".pt":
                write_content(output.with_suffix(".json"), read_torch_file(path))
            else:
                with disk_errors(output):
                    shutil.copyfile(path, output)
            done.written += 1
        except StagescopeError as error:
            done.failed[path] = str(error)
    return done
