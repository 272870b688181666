"""The identity of a process: its fingerprint and its layout.

Everything here runs in the background thread, is bounded in time, and never raises: a value that
cannot be read is absent, not guessed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypedDict

from stagescope import versions
from stagescope.wire.schema import LAYOUT_COLUMNS
from stagescope_workers.probe.code import loaded_code

PACKAGES: Final = (
    "stagescope", "numpy", "torch", "torch_npu", "ray", "transformers", "verl", "areal", "slime",
    "miles", "NexRL", "skyrl", "openrlhf", "nemo-rl", "trl", "vllm", "vllm-ascend", "sglang",
    "megatron-core", "mindspeed", "deepspeed", "accelerate", "flash-attn", "triton", "ctranslate2",
    "mindstudio-probe", "tensordict", "peft", "datasets",
)  # fmt: skip

_SECRET: Final = re.compile(r"token|secret|passw|pwd|key|credential|auth|cookie|session", re.I)
# Variables that influence a training or its numbers. This is a list of what may be shown, because
# a list of what must not be shown is never complete.
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
        settings: of the run.
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
