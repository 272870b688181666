"""Files that are more than tensors and plain values, as files that can be read without trust.

What `read_torch_file` can read is rewritten in this process. What it refuses is loaded with full
unpickling, which runs whatever code the file holds: only where the caller allows it, each file in a
process of its own, with an empty environment but for what Python needs to start, in an empty
directory, and for a limited time. That keeps accidents and secrets away; it is no prison: the code
has the rights of the user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Final

from stagescope.wire.errors import Conflict, Forbidden, InvalidInput, NotFound, StagescopeError
from stagescope_service.dumps.formats.content import write_content
from stagescope_service.dumps.formats.listing import files_of
from stagescope_service.dumps.pickles.torch_file import load_running_code, read_torch_file
from stagescope_service.store.tensorfile import disk_errors

SECONDS: Final = 600.0
"""How long one file may take."""
_LAST_BYTES: Final = 4096
_KEPT_VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")


@dataclasses.dataclass
class Conversion:
    """What to convert, and what became of it.

    Attributes:
        source: a file, or a directory with everything below it.
        safe: .pt files that can be read as they are.
        unsafe: those that cannot, with the reason.
        others: files that are copied as they are.
        failed: files that could not be converted, with the reason.
        written: how many were.
    """

    source: Path
    safe: list[Path] = dataclasses.field(default_factory=list)
    unsafe: dict[Path, str] = dataclasses.field(default_factory=dict)
    others: list[Path] = dataclasses.field(default_factory=list)
    failed: dict[Path, str] = dataclasses.field(default_factory=dict)
    written: int = 0


def plan_conversion(source: Path) -> Conversion:
    """Look at every file; nothing is run and nothing written.

    Raises:
        NotFound: no such file or directory, or no .pt file in it.
        TooLarge: more files than a dump has.
        StoreError: the disk refused.
    """
    found, problems = files_of(source)
    plan = Conversion(source)
    plan.failed |= {each.path: each.message for each in problems}
    for each in found:
        if each.path.suffix != ".pt":
            plan.others.append(each.path)
            continue
        try:
            read_torch_file(each.path)
        except Forbidden as error:
            plan.unsafe[each.path] = error.wrong
        except StagescopeError as error:
            plan.failed[each.path] = str(error)
        else:
            plan.safe.append(each.path)
    if not plan.safe and not plan.unsafe and not plan.failed:
        raise NotFound(f"{source} holds no .pt file", expected="files that torch.save wrote")
    return plan


def convert_files(plan: Conversion, target: Path, *, run_code: bool = False) -> None:
    """Write each file below `target`; `plan` says then what became of it.

    `X.pt` becomes `X.json` with `X.safetensors` beside it, which the readers take in its place.

    Args:
        plan: what `plan_conversion` gave.
        target: a directory that is empty or not there.
        run_code: load the unsafe ones, each in a process of its own.

    Raises:
        Conflict: the directory is not empty.
        InvalidInput: it lies in the source.
        StoreError: the disk refused.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Conflict(f"{target} is there and not empty", expected="a new directory")
    if plan.source.is_dir() and target.resolve().is_relative_to(plan.source.resolve()):
        raise InvalidInput(f"{target} lies in {plan.source}", expected="a directory elsewhere")
    for path in (*plan.safe, *(plan.unsafe if run_code else ()), *plan.others):
        where = _target_of(plan, path, target)
        try:
            with disk_errors(where):
                where.parent.mkdir(parents=True, exist_ok=True)
            if path in plan.unsafe:
                _convert_apart(path, where)
            elif path.suffix == ".pt":
                write_content(where, read_torch_file(path))
            else:
                with disk_errors(where):
                    shutil.copyfile(path, where)
            plan.written += 1
        except StagescopeError as error:
            plan.failed[path] = str(error)


def _target_of(plan: Conversion, path: Path, target: Path) -> Path:
    below = path.relative_to(plan.source if plan.source.is_dir() else plan.source.parent)
    return (target / below).with_suffix(".json") if path.suffix == ".pt" else target / below


def _convert_apart(path: Path, target: Path) -> None:
    """Convert one file in a process of its own.

    Raises:
        InvalidInput: it failed, or took too long; its last words are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="stagescope-convert-") as empty:
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment |= {"HOME": empty, "TMPDIR": empty}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", __name__, str(path.resolve()), str(target.resolve())]
        with tempfile.TemporaryFile() as errors:
            status = _run(command, Path(empty), environment, errors)
            errors.seek(max(errors.tell() - _LAST_BYTES, 0))
            said = errors.read(_LAST_BYTES).decode(errors="replace").strip().splitlines()
    if status is None:
        raise InvalidInput(f"{path} was not loaded within {SECONDS:.0f} s")
    if status != 0:
        raise InvalidInput(
            f"{path} could not be loaded: {said[-1][:500] if said else f'exit status {status}'}",
            advice="what it holds must be importable here: install the package that wrote it",
        )


def _run(
    command: list[str], directory: Path, environment: dict[str, str], errors: IO[bytes]
) -> int | None:
    """Run a command to its end, with all that it started; None where it took too long."""
    process = subprocess.Popen(
        command, cwd=directory, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(arguments: list[str]) -> None:
    """Convert one file: the whole of the process that `_convert_apart` starts."""
    source, target = map(Path, arguments)
    write_content(target, load_running_code(source))


if __name__ == "__main__":
    main(sys.argv[1:])
