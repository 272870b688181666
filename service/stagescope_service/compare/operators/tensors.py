"""Compare two dumps of full tensors by msprobe in a separate process, and read its table.

msprobe is the established tool for full tensors (cosine, element-wise errors), so its numbers are
shown unchanged. Its verdicts are left out: in a test with a bfloat16 and a float32 model they
called 510 of 900 operators wrong. With one weight 1.5 times too large they called all 900 right.
"""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from stagescope_service.compare.operators.msprobe_compare import EXIT_NOT_INSTALLED
from stagescope_service.dumps.formats.msprobe_directory import TENSOR_FOLDER
from stagescope_service.dumps.msprobe.operator_query import iterate_rows
from stagescope_service.store.tensorfile import disk_errors
from stagescope_wire.errors import InvalidInput, MissingExtra, NotFound, TooLarge
from stagescope_wire.versions import install_command

MAX_SECONDS: Final = 900.0
MAX_ROWS: Final = 1_000_000
_LOG_BYTES: Final = 20_000

COLUMNS: Final[Mapping[str, str]] = {
    "NPU Name": "name", "Bench Name": "name_b", "NPU Dtype": "dtype_a", "Bench Dtype": "dtype_b",
    "NPU Tensor Shape": "shape_a", "Bench Tensor Shape": "shape_b", "Cosine": "cosine",
    "EucDist": "euclidean_distance", "MaxAbsErr": "max_abs_error",
    "MaxRelativeErr": "max_relative_error", "One Thousandth Err Ratio": "share_within_1e-3",
    "Five Thousandths Err Ratio": "share_within_5e-3", "NPU max": "max_a", "NPU min": "min_a",
    "NPU mean": "mean_a", "NPU l2norm": "norm_a", "Bench max": "max_b", "Bench min": "min_b",
    "Bench mean": "mean_b", "Bench l2norm": "norm_b",
}  # fmt: skip
"""msprobe's columns that are kept -> their names in answers; `a` is msprobe's NPU side."""

TensorRow = dict[str, str | float | None]
"""A tensor of msprobe's table, by the names of `COLUMNS`; unknown is None."""

_TEXTS: Final = ("name", "name_b", "dtype_a", "dtype_b", "shape_a", "shape_b")
_UNKNOWN: Final = frozenset({"", "n/a", "none", "unsupported"})


def compare_tensors(a: Path, b: Path, tables: tuple[Path, Path]) -> list[TensorRow]:
    """Compare the tensors of two dumps by msprobe.

    Args:
        a, b: directories of dumps of task `tensor`, each of one rank.
        tables: their operator tables.

    Returns:
        A row for each tensor in msprobe's order, with the names of `COLUMNS`; unknown is None.

    Raises:
        NotFound: a dump no longer exists.
        InvalidInput: they cannot be compared, or it took too long.
        MissingExtra: msprobe is not installed where the service runs.
    """
    for directory, table in zip((a, b), tables, strict=True):
        check_dump(directory, table)
    with tempfile.TemporaryDirectory(prefix="stagescope-tensors-") as out:
        log = _run(a, b, Path(out))
        found = sorted(Path(out).glob("compare_result*.csv"))
        if not found:
            raise InvalidInput(
                f"msprobe made no table of {a} and {b}: {log or 'its log is empty'}",
                expected="two dumps of one level that share operators",
            )
        return list(read_table(found[0]))


def check_dump(directory: Path, table: Path) -> None:
    """Check that a dump holds tensors, and refers to no file outside its directory.

    Raises:
        NotFound: it no longer exists.
        InvalidInput: a name or link leads outside.
    """
    tensors = directory / TENSOR_FOLDER
    if not tensors.is_dir():
        raise NotFound(f"there are no tensors in {directory}", advice="they may have been removed")
    for row in iterate_rows(table, columns=["data_name"]):
        name = row["data_name"]
        if name is not None and ("/" in name or "\\" in name or name.startswith(".")):
            raise InvalidInput(f"the dump names a file {name!r:.200}", expected="a plain name")
    with disk_errors(tensors):
        links = [entry.name for entry in os.scandir(tensors) if entry.is_symlink()]
    if links or tensors.is_symlink():
        raise InvalidInput(f"{tensors} holds links: {', '.join(links[:5])}", expected="files")


def _run(a: Path, b: Path, out: Path) -> str:
    """Run msprobe's comparison; return the last errors of its log."""
    command = [sys.executable, "-m", "stagescope_service.compare.operators.msprobe_compare"]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    with disk_errors(out), (out / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, str(a), str(b), str(out)], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, env=environment, cwd=out, start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(MAX_SECONDS)
    except subprocess.TimeoutExpired:
        raise InvalidInput(
            f"msprobe's comparison took over {MAX_SECONDS:.0f} s",
            advice="capture fewer operators: give the capture a list or a scope",
        ) from None
    finally:
        # Its workers are in its session, so none outlives it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log_errors = _errors(out / "log")
    if code == EXIT_NOT_INSTALLED:
        raise MissingExtra(
            f"msprobe cannot be imported where the service runs: {log_errors}",
            advice=f"{install_command('msprobe')} there",
        )
    return log_errors


def _errors(log: Path) -> str:
    with disk_errors(log), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").rstrip().split("\n")
    wrong = [line for line in lines if "[ERROR]" in line or "Error" in line]
    return " ".join(" | ".join(wrong[-3:] or lines[-1:]).split())[:1000]


def read_table(path: Path) -> Iterator[TensorRow]:
    """Yield the rows of msprobe's table, without its verdicts.

    Raises:
        TooLarge: it has more than `MAX_ROWS` rows.
        InvalidInput: it is no table of msprobe.
    """
    with disk_errors(path), path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        names = {ours: theirs for theirs, ours in COLUMNS.items()}
        if "NPU Name" not in (reader.fieldnames or ()):
            raise InvalidInput(f"{path.name} is no table of msprobe's", expected="NPU Name, ...")
        for count, row in enumerate(reader):
            if count >= MAX_ROWS:
                raise TooLarge(f"{path.name} has over {MAX_ROWS} rows")
            yield {
                ours: (_text if ours in _TEXTS else _number)(row.get(theirs))
                for ours, theirs in names.items()
            }


def _text(cell: str | None) -> str | None:
    text = (cell or "").strip()
    text = text.removeprefix("<class '").removesuffix("'>")  # a Python number, not a tensor
    return None if text.lower() in _UNKNOWN else text[:1000].removeprefix("torch.")


def _number(cell: str | None) -> float | None:
    text = (cell or "").strip()
    try:
        return float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        return None  # 'unsupported', 'shape unmatched', 'N/A': the columns of shapes explain it
