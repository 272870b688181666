"""A comparison whose output is not read to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.dump_files import nexrl_directory

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "import sys; from stagescope.cli import main; sys.exit(main())"


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "json"])
def test_the_exit_status_is_right_if_output_is_not_read(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    folder = nexrl_directory(tmp_path / "a")
    paths = os.pathsep.join(str(ROOT / name) for name in ("client", "workers", "service"))
    read, write = os.pipe()
    os.close(read)  # nothing reads the first line
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "compare", str(folder), str(folder), *words],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": paths},
        )
    finally:
        os.close(write)
    said = [line for line in done.stderr.splitlines() if not line.startswith("compiling")]
    assert (done.returncode, said) == (0, [])
