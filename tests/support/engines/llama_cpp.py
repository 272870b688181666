"""llama.cpp's own HTTP server in a process of its own, real and on CPU.

Run as a program it serves until its standard input ends, so that it never outlives its test:
`python llama_cpp.py MODEL.gguf [KEY]` prints its URL.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def llama_cpp(model: Path, key: str = "") -> Iterator[str]:
    """Serve `model`; yields the URL."""
    command = [sys.executable, __file__, str(model), *([key] if key else [])]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), f"llama.cpp's server did not start: {url!r}"
        yield url
    finally:
        process.kill()
        process.communicate()


def serve(model: str, key: str) -> None:
    """Serve until standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()  # pyright: ignore[reportAttributeAccessIssue]
    params.model.path = model
    params.n_ctx, params.n_parallel = 1024, 2
    params.cpuparams.n_threads = 1
    params.warmup = False
    params.port = 0
    if key:
        params.api_keys = [key]
    server = xllamacpp.Server(params)  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
