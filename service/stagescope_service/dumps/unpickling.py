"""Converts .pt files, also those with more than tensors and plain values, to safe formats.

Files that `read_torch_file` can read are rewritten in this process. Files that it refuses are
loaded with full unpickling, which runs whatever code they hold: only if the caller allows it, each
file in a process of its own, with an environment of only what Python needs to start, in an empty
directory, and for a limited time. This prevents accidents and keeps secrets out of reach; it is no
sandbox: the code has the rights of the user.
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
    """The files to convert, and the outcome.

    Attributes:
        source: a file, or a directory with everything below it.
        safe: .pt files that can be read without running code.
        unsafe: those that cannot, with the reason.
        others: files that are copied unchanged.
        failed: files that could not be converted, with the reason.
        written: number of files written.
    """

    source: Path
    safe: list[Path] = dataclasses.field(default_factory=list)
    unsafe: dict[Path, str] = dataclasses.field(default_factory=dict)
    others: list[Path] = dataclasses.field(default_factory=list)
    failed: dict[Path, str] = dataclasses.field(default_factory=dict)
    written: int = 0


def plan_conversion(source: Path) -> Conversion:
    """Classify every file; no code is run and nothing is written.

    Raises:
        NotFound: no such file or directory, or no .pt file in it.
        TooLarge: more than `listing.MAX_FILES` files.
        StoreError: the disk reported an error.
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
    """Write each file below `target` and record the outcome in `plan`.

    `X.pt` becomes `X.json` with `X.safetensors` beside it, which the readers accept instead.

    Args:
        plan: the result of `plan_conversion`.
        target: a directory that is empty or does not exist.
        run_code: load the unsafe ones, each in a process of its own.

    Raises:
        Conflict: the directory is not empty.
        InvalidInput: it lies in the source.
        StoreError: the disk reported an error.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Conflict(f"{target} is there and not empty", expected="a new directory")
    if plan.source.is_dir() and target.resolve().is_relative_to(plan.source.resolve()):
        raise InvalidInput(f"{target} lies in {plan.source}", expected="a directory elsewhere")
    for path in (*plan.safe, *(plan.unsafe if run_code else ()), *plan.others):
        output = _output_of(plan, path, target)
        try:
            with disk_errors(output):
                output.parent.mkdir(parents=True, exist_ok=True)
            if path in plan.unsafe:
                _convert_in_subprocess(path, output)
            elif path.suffix == ".pt":
                write_content(output, read_torch_file(path))
            else:
                with disk_errors(output):
                    shutil.copyfile(path, output)
            plan.written += 1
        except StagescopeError as error:
            plan.failed[path] = str(error)


def _output_of(plan: Conversion, path: Path, target: Path) -> Path:
    below = path.relative_to(plan.source if plan.source.is_dir() else plan.source.parent)
    return (target / below).with_suffix(".json") if path.suffix == ".pt" else target / below


def _convert_in_subprocess(path: Path, target: Path) -> None:
    """Convert one file in a process of its own.

    Raises:
        InvalidInput: it failed, or took too long; the message ends with its last line of stderr.
    """
    with tempfile.TemporaryDirectory(prefix="stagescope-convert-") as empty:
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment |= {"HOME": empty, "TMPDIR": empty}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", __name__, str(path.resolve()), str(target.resolve())]
        with tempfile.TemporaryFile() as errors:
            status = _run(command, Path(empty), environment, errors)
            errors.seek(max(errors.tell() - _LAST_BYTES, 0))
            output = errors.read(_LAST_BYTES).decode(errors="replace").strip().split("\n")
    if status is None:
        raise InvalidInput(f"{path} was not loaded within {SECONDS:.0f} s")
    if status != 0:
        reason = output[-1][:500] if output[-1] else f"exit status {status}"
        raise InvalidInput(
            f"{path} could not be loaded: {reason}",
            advice="what it holds must be importable here: install the package that wrote it",
        )


def _run(
    command: list[str], directory: Path, environment: dict[str, str], errors: IO[bytes]
) -> int | None:
    """Run a command and kill its whole process group at the end; None if it timed out."""
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
    """Convert one file: the entry point of the process that `_convert_in_subprocess` starts."""
    source, target = map(Path, arguments)
    write_content(target, load_running_code(source))


if __name__ == "__main__":
    main(sys.argv[1:])
