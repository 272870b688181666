"""msprobe's dump directories: full tensors by operator.

`{dump_path}/step{N}/{rankR | procPID}/` holds `dump.json`, its sidecars and, where tensors were
dumped, `dump_tensor_data/*.pt`, one tensor a file. Operator statistics are read elsewhere
(`stagescope operators`, `stagescope_service.dumps.msprobe`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MARKS: Final = ("dump.json", "debug.json")
TENSOR_FOLDER: Final = "dump_tensor_data"
_TABLE: Final = "operators.parquet"


def rank_directories(names: Iterable[str]) -> list[str]:
    """Return the directories that msprobe wrote for a rank, by the names of the files in them."""
    found = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] in MARKS}
    return sorted(found)


def operator_files(names: Iterable[str]) -> set[str]:
    """Return those of the names that belong to a dump of msprobe's, or to its operator table."""
    names = [*names]
    directories = {f"{each}/" if each else "" for each in rank_directories(names)}
    found = {name for name in names if name.rpartition("/")[2] == _TABLE}
    for name in names:
        folder = name.rpartition("/")[0]
        if {f"{folder}/" if folder else "", f"{folder.removesuffix(TENSOR_FOLDER)}"} & directories:
            found.add(name)
    return found
