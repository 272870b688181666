"""Entry point of the process that runs msprobe's comparison of two dumps of full tensors.

`python -m stagescope_service.compare.operators.msprobe_compare A B OUT` compares the dumps in two
directories, each of one rank. `OUT` is an empty directory for msprobe's table. This process imports
nothing else, because msprobe forks, prints, and patches modules that it imports. It loads tensors
with `weights_only`, so no code in a file is run.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Final

EXIT_NOT_INSTALLED: Final = 3
"""Exit code: msprobe is not installed."""


def main(a: str, b: str, out: str) -> int:
    """Compare two dumps; msprobe writes its table to `out`."""
    os.nice(10)
    try:
        from msprobe.pytorch.compare.pt_compare import pt_compare
    except ImportError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the log of this process
        return EXIT_NOT_INSTALLED
    paths = {"npu_path": f"{a}/dump.json", "bench_path": f"{b}/dump.json"}
    pt_compare({**paths, "is_print_compare_log": False}, out, xlsx=False)
    for book in Path(out).glob("*.xlsx"):
        _write_csv(book)
    return 0


def _write_csv(book: Path) -> None:
    """Convert the table of msprobe 26.0, which writes only a workbook, to CSV as 26.2 writes it."""
    from openpyxl import load_workbook  # type: ignore[import-untyped]

    sheet = load_workbook(book, read_only=True).worksheets[0]
    with book.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(sheet.iter_rows(values_only=True))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
