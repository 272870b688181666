"""Make the tarball of wheels for a machine without network: `make trial-device-wheels`.

The machine has torch, numpy, numba, safetensors and pyarrow. stagescope itself comes as source,
and its probe needs `packaging` and PyYAML besides. The rest is what msprobe imports. The list
leaves out what msprobe declares and a capture never imports: skl2onnx, with onnx, scipy and
scikit-learn, has 80 MB. So the wheels are installed with `--no-deps`. Ray (70 MB) is not needed:
the trial's probe writes into a spool.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
MOST_BYTES: Final = 50_000_000
NAMES: Final = (
    "packaging", "pyyaml",  # the probe
    "mindstudio-probe", "einops", "pandas", "psutil", "python-dateutil", "pytz", "six", "tqdm",
    "tensorboard", "absl-py", "protobuf",  # msprobe imports the first, which imports the others
    "matplotlib", "contourpy", "cycler", "kiwisolver", "pillow", "pyparsing",  # so here
)  # fmt: skip
PURE: Final = ("fonttools",)
"""Of these the wheel without compiled code: it is a quarter of the other."""
_GLIBC: Final = (28, 27, 26, 24, 17, 12)
"""manylinux_2_N; pip matches each alone."""


def download(folder: Path, python: str, machine: str) -> None:
    """Download the wheels for a version of Python and a kind of machine.

    Raises:
        subprocess.CalledProcessError: pip finds none for one of them; its output says which.
    """
    for names, choice in (
        (NAMES, ["--implementation", "cp", *_platforms(machine)]),
        (PURE, ["--implementation", "py", "--abi", "none", "--platform", "any"]),
    ):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
             "--no-deps", "--only-binary=:all:", "--python-version", python, *choice,
             *_versions(python), "-d", str(folder), *names],
            check=True,
        )  # fmt: skip


def _versions(python: str) -> list[str]:
    """Return the constraints: those with which everything was tried, where that Python has them."""
    minor = int(python.split(".")[1])
    return ["-c", str(ROOT / "deploy/constraints.txt")] if minor >= 11 else []


def _platforms(machine: str) -> list[str]:
    names = [*(f"manylinux_2_{number}_{machine}" for number in _GLIBC), f"manylinux2014_{machine}"]
    return [word for name in names for word in ("--platform", name)]


def pack(folder: Path, archive: Path, most_bytes: int = MOST_BYTES) -> int:
    """Write the wheels of a folder into a tarball, and return its size.

    Raises:
        ValueError: it would be too large; none is left.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    wheels = sorted(folder.glob("*.whl"))
    with tarfile.open(archive, "w") as tar:  # a wheel is compressed already
        for wheel in wheels:
            tar.add(wheel, wheel.name, filter=_anonymous)
    size = archive.stat().st_size
    if size > most_bytes:
        archive.unlink()
        largest = sorted(wheels, key=lambda each: -each.stat().st_size)[:5]
        named = ", ".join(f"{each.name} {each.stat().st_size / 1e6:.1f} MB" for each in largest)
        raise ValueError(
            f"the tarball would have {size / 1e6:.1f} MB, the limit is {most_bytes / 1e6:.0f} MB; "
            f"the largest wheels: {named}"
        )
    return size


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


def archive_name(python: str, machine: str) -> str:
    return f"trial-device-wheels-cp{python.replace('.', '')}-{machine}.tar"


def main(arguments: list[str] | None = None) -> int:
    """Make the tarball; return 1 where a wheel is missing, or they are too large."""
    parser = argparse.ArgumentParser(prog="wheels", description=__doc__)
    parser.add_argument("--python", default="3.12", help="of the other machine: 3.11, 3.12")
    parser.add_argument("--machine", default="x86_64", help="its uname -m: x86_64, aarch64")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    given = parser.parse_args(arguments)
    archive = given.dist / archive_name(given.python, given.machine)
    with tempfile.TemporaryDirectory(prefix="trial-wheels-") as name:
        try:
            download(Path(name), given.python, given.machine)
            size = pack(Path(name), archive)
        except subprocess.CalledProcessError:  # pip has said why
            return 1
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    sys.stdout.write(f"{archive}: {size / 1e6:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
