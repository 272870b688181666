"""The identity of a process: its fingerprint, its layout and the hashes of its code.

Everything here runs in the background thread, is bounded in time, and never raises: a value that
cannot be read is absent, not guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final, TypedDict

from stagescope_wire import versions
from stagescope_wire.schema import LAYOUT_COLUMNS

PACKAGES: Final = (
    "stagescope", "numpy", "torch", "torch_npu", "ray", "transformers", "verl", "areal", "slime",
    "miles", "NexRL", "skyrl", "openrlhf", "nemo-rl", "trl", "vllm", "vllm-ascend", "sglang",
    "megatron-core", "mindspeed", "deepspeed", "accelerate", "flash-attn", "triton", "ctranslate2",
    "mindstudio-probe", "tensordict", "peft", "datasets",
)  # fmt: skip

_SECRET: Final = re.compile(r"token|secret|passw|pwd|key|credential|auth|cookie|session", re.I)
# Variables that influence a training or its numbers. This is a list of what may be shown, because a
# list of secrets is never complete.
_SHOWN: Final = re.compile(
    r"(ACCELERATE|ACL|ASCEND|ATB|CANN|CONDA|CT2|CUBLAS|CUDA|CUDNN|DEEPSPEED|FLASH|FSDP|GLOO|GOMP|"
    r"GPU|HABANA|HCCL|HCOMM|HF|HIP|HYDRA|KMP|LD|LOCAL|MASTER|MEGATRON|MINDSPEED|MKL|MSPROBE|NCCL|"
    r"NEURON|NPU|NUMBA|NUMEXPR|NVIDIA|NVTE|OMP|OPENBLAS|PYTHON|PYTORCH|RANK|RAY|ROCM|ROCR|SGLANG|"
    r"SLURM|STAGESCOPE|TASK|TBE|TE|TF32|TOKENIZERS|TORCH|TORCHINDUCTOR|TRANSFORMERS|TRITON|VERL|"
    r"VLLM|WEAVER|WORLD|XDG|XLA)(_|$|[A-Z0-9])"
)
_PASSWORD: Final = re.compile(r"://[^/\s@]+@")
_GIT_SECONDS: Final = 2.0
_MAX_VALUE: Final = 2000
_MAX_VARIABLES: Final = 500
_MAX_ARGUMENTS: Final = 100


def fingerprint(
    settings: Mapping[str, object], directory: str | None = None, *, with_code: bool = True
) -> dict[str, object]:
    """Return what determines this process: code, packages, driver, environment, settings.

    Args:
        settings: settings of the run.
        directory: where the training was started, if that is not this process's directory.
        with_code: whether to hash the code that is loaded.
    """
    parts: dict[str, Callable[[], object]] = {
        "git": lambda: git_state(Path(directory or Path.cwd())),
        "code": loaded_code,
        "config": lambda: dict(settings),
        "python": platform.python_version,
        "platform": platform.platform,
        "argv": lambda: visible_arguments(sys.argv[:_MAX_ARGUMENTS]),
        "packages": package_versions,
        "versions": version_remarks,
        "drivers": driver_versions,
        "environment": lambda: visible_environment(os.environ),
    }
    if not with_code:
        del parts["code"]
    found: dict[str, object] = {}
    for name, read in parts.items():
        with contextlib.suppress(Exception):
            found[name] = read()
    return found


def is_secret(name: str) -> bool:
    """Return whether the value of a variable, option or field of this name may be a secret."""
    return _SECRET.search(name) is not None


def has_password(value: str) -> bool:
    """Return whether a text has an address with a password: https://user:password@host."""
    return _PASSWORD.search(value) is not None


def visible_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that influence a training, except those that may hold a secret."""
    shown = (name for name in environment if _SHOWN.match(name) and not is_secret(name))
    names = sorted(shown)[:_MAX_VARIABLES]
    values = {name: environment[name][:_MAX_VALUE] for name in names}
    return {name: value for name, value in values.items() if not has_password(value)}


def visible_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without possible secrets: `--api-key=x`, `--api-key x`."""
    shown: list[str] = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        secret = before.startswith("-") and "=" not in before and is_secret(before)
        value = secret and not argument.startswith("-")
        shown.append("..." if value else hide(argument)[:_MAX_VALUE])
    return shown


def visible_line(line: str) -> str:
    """Return a command line, as one text, without possible secrets; see `visible_arguments`."""
    try:
        arguments = shlex.split(line)
    except ValueError:  # Ray joins arguments by spaces, quotes and all
        arguments = line.split()
    return " ".join(visible_arguments(arguments[:_MAX_ARGUMENTS]))[:_MAX_VALUE]


def hide(argument: str) -> str:
    """Return a command line argument without the value of an option that may be a secret."""
    name, separator, _ = argument.partition("=")
    if separator and is_secret(name):
        return f"{name}=..."
    return _PASSWORD.sub("://...@", argument)


class GitState(TypedDict):
    """The commit of a repository, and whether tracked files differ from it; None is unknown."""

    commit: str | None
    dirty: bool | None


def git_state(directory: Path) -> GitState | None:
    """Return {commit, dirty} of the repository around `directory`; None where there is none."""
    git = shutil.which("git")
    if git is None or not any((up / ".git").exists() for up in (directory, *directory.parents)):
        return None

    def run_git(*arguments: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(
                [git, "-C", str(directory), *arguments],
                capture_output=True,
                check=True,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=_GIT_SECONDS,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            )
            return answer.stdout.strip()
        return None

    commit = run_git("rev-parse", "HEAD")
    changes = run_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that influence numbers."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def version_remarks() -> dict[str, list[str]]:
    """Return a line for each package that is unsupported, or newer than the versions tried."""
    lines: dict[str, list[str]] = {"unsupported": [], "untried": []}
    for remark in versions.remarks():
        lines["unsupported" if remark.is_unsupported else "untried"].append(str(remark))
    return lines


def driver_versions() -> dict[str, str]:
    """Return the versions of CUDA, its driver and CANN that can be read without a device."""
    found = {}
    build = getattr(sys.modules.get("torch"), "version", None)
    for name in ("cuda", "hip", "cann"):
        version = getattr(build, name, None)
        if isinstance(version, str):
            found[name] = version
    cann = os.environ.get("ASCEND_TOOLKIT_HOME") or "/usr/local/Ascend/ascend-toolkit/latest"
    files = {
        "nvidia_driver": Path("/proc/driver/nvidia/version"),
        "ascend_driver": Path("/usr/local/Ascend/driver/version.info"),
        "cann_toolkit": Path(cann) / "version.cfg",
    }
    for name, path in files.items():
        with contextlib.suppress(OSError):
            found[name] = path.read_text(errors="replace")[:500].strip()
    return found


def detect_layout(declared: Mapping[str, object], *, node: str | None) -> dict[str, object]:
    """Return the layout: the caller's columns, and those that the process can detect.

    Args:
        declared: the caller's columns, which take precedence. Unknown names are kept.
        node: Ray's id of this node, where there is one.
    """
    layout: dict[str, object] = {"host": socket.gethostname(), "node": node}
    with contextlib.suppress(Exception):
        layout.update(device_in_use())
    layout.update(declared)
    columns = {name: layout[name] for name in LAYOUT_COLUMNS if layout.get(name) is not None}
    others = {name: value for name, value in declared.items() if name not in LAYOUT_COLUMNS}
    return {**columns, **others}


def device_in_use() -> dict[str, object]:
    """Return kind, index and serial of the device in use; never initialises a device."""
    torch = sys.modules.get("torch")
    for kind in ("npu", "cuda"):
        backend = getattr(torch, kind, None)
        if backend is None or not backend.is_available():
            continue
        found: dict[str, object] = {"device_kind": kind}
        if backend.is_initialized():
            index = int(backend.current_device())
            found["device_index"] = index
            serial = getattr(backend.get_device_properties(index), "uuid", None)
            found["device_serial"] = None if serial is None else str(serial)
        elif os.environ.get("LOCAL_RANK", "").isdigit():
            found["device_index"] = int(os.environ["LOCAL_RANK"])
        return found
    return {"device_kind": "cpu"} if torch is not None else {}


MAX_FILES: Final = 400
"""`stagescope_service.compare.fingerprints.MOST_MODULES` is the same."""
_MAX_BYTES: Final = 1 << 21
_DIGITS: Final = 12
_MAIN: Final = "__main__"
_RAY_WORKER: Final = "default_worker.py"
_OURS: Final = frozenset({
    "stagescope", "stagescope_wire", "stagescope_workers", "stagescope_service", "sitecustomize",
})  # fmt: skip
"""Our own packages; `packages` has their version."""


def loaded_code() -> dict[str, str]:
    """Return name of a module -> hash of its file; the main script has its file's name.

    Left out are the standard library, installed packages, and modules beyond `MAX_FILES`.
    """
    installed = _installed_folders()
    found: dict[str, str] = {}
    for name, path in _files():
        is_main = name == _MAIN
        if path.name == _RAY_WORKER or name.partition(".")[0] in _OURS:
            continue
        if not is_main and any(folder in path.parents for folder in installed):
            continue
        digest = file_hash(path)
        if digest is not None:
            found[path.name if is_main else name] = digest
        if len(found) >= MAX_FILES:
            break
    return found


def script_of(line: str, directory: str | None) -> tuple[str, str] | None:
    """Return (name, hash) of the script in a command line, such as a Ray job's driver.

    Args:
        line: the command line.
        directory: where it was started; None: not known.
    """
    for word in line.split():
        if word.endswith(".py"):
            path = Path(directory or "", word)
            digest = file_hash(path) if directory is not None or path.is_absolute() else None
            return None if digest is None else (path.name, digest)
    return None


def file_hash(path: Path) -> str | None:
    """Return a hash of a file of code; None where it cannot be read, or is no code."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]
    except OSError:
        return None


def _files() -> Iterator[tuple[str, Path]]:
    """Yield (name, source file) of the loaded modules, the main script first."""
    modules = dict(sys.modules)
    main = modules.pop(_MAIN, None)
    for name, module in [(_MAIN, main), *sorted(modules.items(), key=lambda item: item[0])]:
        file = _file_of(module) if isinstance(module, ModuleType) else None
        if isinstance(file, str) and file.endswith(".py"):
            yield name, Path(file).absolute()


def _file_of(module: ModuleType) -> object:
    # `getattr` would load a module that waits for its first use, in this thread.
    held: dict[str, object] = object.__getattribute__(module, "__dict__")
    return held.get("__file__")


def _installed_folders() -> list[Path]:
    paths = sysconfig.get_paths()
    named = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = (path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    return [Path(path).absolute() for path in {*named, *others}]
