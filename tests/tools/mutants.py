"""Change single operators and constants of the service, and see whether its tests notice.

    python -m tests.tools.mutants [--seed N] [--count N] [package ...]

Each mutant is tried in a copy of the repository, against the tests of its package, those of its
own file first; what no test notices is printed as a difference. A survivor is either equivalent to
the original, or shows a test that is missing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SERVICE: Final = "service/stagescope_service"
PACKAGES: Final = ("core", "statistics", "rules", "store", "rows", "coordinator")
CPU_SECONDS: Final = 300
"""Of one mutant's tests; a mutant that never ends is caught, too."""
NOT_SHRUNK: Final = """
from hypothesis import Phase
settings.register_profile(
    "mutants", settings.default, phases=[Phase.explicit, Phase.generate], database=None
)
settings.load_profile("mutants")
"""
"""Appended to tests/conftest.py: whether an example fails is enough, the smallest is not needed."""
_OTHER: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


def changed(node: ast.AST) -> ast.AST | None:
    """Return an expression that does something else, or None."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare):
        if type(other.ops[0]) in _OTHER:
            other.ops[0] = _OTHER[type(other.ops[0])]()  # type: ignore[call-overload]
            return other
    elif isinstance(other, ast.BinOp | ast.BoolOp):
        if type(other.op) in _OTHER:
            other.op = _OTHER[type(other.op)]()  # type: ignore[assignment]
            return other
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not | ast.USub):
        return other.operand
    elif isinstance(other, ast.IfExp):
        other.body, other.orelse = other.orelse, other.body
        return other
    elif isinstance(other, ast.Constant):
        if isinstance(other.value, bool):
            return ast.Constant(not other.value)
        if isinstance(other.value, int | float):
            return ast.Constant(other.value + 1)
    return None


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what runs: no annotation, and nothing that is for types alone."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        if isinstance(node, ast.ClassDef) and name == "keywords":  # total=False, of a TypedDict
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                # An f-string has no places of its own before Python 3.12.
                if isinstance(child, ast.expr) and not isinstance(child, ast.JoinedStr):
                    yield child
                if not isinstance(child, ast.JoinedStr):
                    yield from expressions(child)


def mutants(text: str) -> list[str]:
    """Return every mutant of a source."""
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    found = []
    for node in expressions(ast.parse(text)):
        if (other := changed(node)) is not None:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + node.end_col_offset
            new = f"({ast.unparse(ast.fix_missing_locations(other))})".encode()
            found.append((text.encode()[:first] + new + text.encode()[last:]).decode())
    return found


def tests_of(tree: Path, path: Path, package: str) -> list[str]:
    """Return the package's files of tests, those that import or are named after `path` first."""
    module = ".".join(path.relative_to(tree / "service").with_suffix("").parts)
    files = sorted((tree / "tests/service" / package).rglob("test_*.py"))
    own = [each for each in files if module in each.read_text() or path.stem in each.stem]
    return [str(each) for each in [*own, *(each for each in files if each not in own)]]


def survives(tree: Path, tests: list[str]) -> bool:
    """Return whether the tests pass in `tree`."""
    code = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / n) for n in PATHS)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not ray", "--timeout=120"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env=code,
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS)),
    )
    return done.returncode == 0


PATHS: Final = ("service", "workers", "client")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10, help="mutants of each package")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for name in (*PATHS, "tests", "pyproject.toml"):
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, tree / name)
        with (tree / "tests/conftest.py").open("a") as conftest:
            conftest.write(NOT_SHRUNK)
        for package in given.packages:
            try_package(tree, package, random.Random(f"{given.seed} {package}"), given.count)


def try_package(tree: Path, package: str, chance: random.Random, count: int) -> None:
    files = sorted((tree / SERVICE / package).rglob("*.py"))
    every = [(file, mutant) for file in files for mutant in mutants(file.read_text())]
    chosen = chance.sample(every, min(count, len(every)))
    survivors = 0
    for number, (file, mutant) in enumerate(chosen, 1):
        original, times, began = file.read_text(), file.stat(), time.monotonic()
        file.write_text(mutant)
        survived = survives(tree, tests_of(tree, file, package))
        file.write_text(original)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # compiled loops stay cached
        survivors += survived
        lines = difflib.unified_diff(original.splitlines(), mutant.splitlines(), lineterm="", n=1)
        verdict = "SURVIVED" if survived else "caught"
        took = time.monotonic() - began
        print(f"{package} {number}/{len(chosen)} {verdict} {took:.0f} s {file.relative_to(tree)}")
        print("\n".join([*lines][2:]), flush=True)
    print(f"{package}: {survivors} of {len(chosen)} of {len(every)} survived", flush=True)


if __name__ == "__main__":
    main()
