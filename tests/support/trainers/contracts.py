"""The recorded interfaces of trainers, and what differs from them in sources and in fakes.

`tests/workers/integrations/contracts/NAME.json` records of a trainer, by its integration's name:

* `repository`, and `read`: the versions (and commits) whose sources have it;
* `functions`: `module:path` -> the parameters, as they are written in a `def`. The parameters of
  several versions are a list of such lists, in which null stands for versions without it;
* `names`: module (or path) -> words that its source has, such as columns and options. Of words
  that were renamed one is enough: they are a list;
* `older`: functions of earlier versions alone.

Nothing of the sources is imported.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

from stagescope_workers.integrations.patches import Patch
from stagescope_workers.integrations.registry import integration
from stagescope_workers.integrations.verl import hooks
from stagescope_workers.integrations.verl.modes import Mode

FOLDER: Final = Path(__file__).parents[2] / "workers/integrations/contracts"
NAMES: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
SOURCES: Final = "STAGESCOPE_TRAINER_SOURCES"
"""Names a folder with checkouts, or unpacked packages: `OpenRLHF`, `OpenRLHF-0.11.2`, ..."""

Contract = dict[str, Any]


def load(name: str) -> Contract:
    """Return the contract of a trainer."""
    found: Contract = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def patches_of(name: str) -> list[Patch]:
    """Return every patch of a trainer's integration."""
    if name == "verl":
        return hooks.patches(Mode("all"))
    found = integration(name)
    assert found is not None
    patches: list[Patch] = importlib.import_module(found.module).patches()
    return patches


def sources(name: str) -> Iterator[Path]:
    """Yield the folders with a trainer's package: checkouts, and the installed distribution."""
    found = integration(name)
    assert found is not None
    root = os.environ.get(SOURCES)
    repository = str(load(name)["repository"]).rpartition("/")[2]
    for path in sorted(Path(root).iterdir()) if root else ():
        if path.name == repository or path.name.startswith(f"{repository}-"):
            yield path
    spec = importlib.util.find_spec(found.package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(folder).parent


def differences(name: str, root: Path) -> list[str]:
    """Return what of a trainer's contract, and of our patches, its sources below `root` lack."""
    contract, found = load(name), list[str]()
    for function, recorded in contract["functions"].items():
        has = of_source(root, function)
        if has not in alternatives(recorded):
            found.append(f"{function} has {has}, recorded is {recorded}")
    for module, names in contract["names"].items():
        path = file_of(root, module)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for each in names:
            words = each if isinstance(each, list) else [each]
            if not any(re.search(rf"\b{word}\b", text) for word in words):
                found.append(f"{module} has no {' and no '.join(words)}")
    return found


def alternatives(recorded: list[Any]) -> list[list[str] | None]:
    """Return the parameters of each version that is recorded; None: it has no such function."""
    return recorded if recorded and isinstance(recorded[0], list) else [recorded]


def of_source(root: Path, function: str) -> list[str] | None:
    """Return the parameters of `module:path` in the sources; None where it is not there."""
    module, _, path = function.partition(":")
    file = file_of(root, module)
    if not file.is_file():
        return None
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    *holders, name = path.split(".")
    for holder in holders:
        classes = (each for each in body if isinstance(each, ast.ClassDef))
        body = next((each.body for each in classes if each.name == holder), [])
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return _written(node.args)
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            # A module calls a function by the name under which it imported it.
            package = module.split(".")[: -node.level] if node.level else []
            return of_source(root, f"{'.'.join([*package, node.module or ''])}:{name}")
    return None


def file_of(root: Path, module: str) -> Path:
    """Return the source file of a module, of a package, or of a path such as `a/b.yaml`."""
    if "/" in module:
        return root / module
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _written(arguments: ast.arguments) -> list[str]:
    found = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg is not None:
        found.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        found.append("*")
    found += [each.arg for each in arguments.kwonlyargs]
    return found if arguments.kwarg is None else [*found, f"**{arguments.kwarg.arg}"]


def fakes_differ(name: str, find: Callable[[str, str], object]) -> list[str]:
    """Return what the fakes of a trainer have beyond its contract.

    A fake may leave parameters out: those that it has are recorded, and in their order.

    Args:
        name: The trainer's.
        find: Returns the fake of a module and the path in it; None: there is none.
    """
    found: list[str] = []
    count = 0
    for function, recorded in load(name)["functions"].items():
        module, _, path = function.partition(":")
        fake = find(module, path)
        if fake is None:
            continue
        count += 1
        has = inspect.signature(cast("Callable[..., object]", fake)).parameters.values()
        if not any(_is_part([*has], version) for version in alternatives(recorded)):
            found.append(f"the fake {function} has {[*map(str, has)]}, recorded is {recorded}")
    return found if count else [f"{name} has no fakes"]


def _is_part(has: list[inspect.Parameter], version: list[str] | None) -> bool:
    if version is None:
        return False
    known = [each.lstrip("*") for each in version]
    names = [
        each.name
        for each in has
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        # What a test says to its fake by a keyword of its own.
        if each.kind is not each.KEYWORD_ONLY or each.name in known
    ]
    return [each for each in known if each in names] == names


def at_path(holder: object, path: str) -> object:
    """Return the attribute of a module or class at a path; None where there is none."""
    for part in path.split("."):
        holder = getattr(holder, part, None)
    return holder


def options_read(name: str) -> set[str]:
    """Return the words by which an integration reads its trainer's configuration."""
    found = integration(name)
    assert found is not None
    spec = importlib.util.find_spec(found.module.removesuffix(".plugin"))
    assert spec is not None
    assert spec.origin is not None
    origin = Path(spec.origin)
    files = origin.parent.glob("*.py") if origin.name == "__init__.py" else (origin,)
    return {word for file in files for word in _words_looked_up(ast.parse(file.read_text()))}


def _words_looked_up(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            for each in node.args[1:] if name in ("lookup", "has") else ():
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.value
