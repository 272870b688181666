"""A real vLLM on the CPU, in an environment of its own; faults are planted in it while it runs.

`make test-vllm` makes the environment. VLLM_PYTHON names another interpreter that has vLLM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from stagescope_wire.engines import OpenAIEngine, connect

ROOT: Final = Path(__file__).resolve().parents[3]
_OWN: Final = ROOT / ".venv-vllm"
PYTHON: Final = Path(os.environ.get("VLLM_PYTHON") or _OWN / "bin/python")
NAME: Final = "policy"
"""What the server calls its base model."""
ADAPTER: Final = "adapter"
"""What the server calls its adapter, if it has one."""
BLOCK: Final = 32
"""Tokens of a block of the prefix cache: shorter prefixes are not cached."""
_START_SECONDS: Final = 240.0
_EXTENSIONS: Final = Path(__file__).with_name("in_vllm")
_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (_EXTENSIONS, ROOT / "workers", ROOT / "client"))),
}


@dataclasses.dataclass
class VllmServer:
    """A running server.

    Attributes:
        url: its address.
        model: directory of the model that it was started with.
        log: file with its output.
        closing: what is closed before the server ends.
    """

    url: str
    model: Path
    log: Path
    closing: contextlib.ExitStack

    def connect(self, timeout: float = 120.0) -> OpenAIEngine:
        """Return a client of it, which is closed when the server ends."""
        engine = self.closing.enter_context(contextlib.closing(connect(self.url, timeout=timeout)))
        assert isinstance(engine, OpenAIEngine)
        return engine

    # --- weights ----------------------------------------------------------------------------

    def load_weights(self, folder: Path, *, reset_cache: bool = True) -> None:
        """Serve the weights of a model directory, dense or MoE, in the right layout.

        Args:
            folder: a model directory.
            reset_cache: whether the prefix cache is emptied, as a right sync does.
        """
        self.rpc("fault_load_weights", path=str(folder))
        if reset_cache:
            self.reset_cache()

    def reload_weights(self, folder: Path) -> None:
        """Call vLLM's own `reload_weights`: right for dense models, silently wrong for MoE."""
        self.rpc("reload_weights", weights_path=str(folder))
        self.reset_cache()

    def reset_cache(self) -> None:
        """Empty the prefix cache."""
        assert self._post("/reset_prefix_cache", {})["success"]

    # --- faults -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def fault(self, name: str, **arguments: object) -> Iterator[None]:
        """Plant a fault of `in_vllm.stagescope_faults` for the duration of the block.

        `with server.fault("head", dtype="float32"): ...`; see the methods there, without `fault_`.
        The prefix cache is emptied on entry and on exit.
        """
        self.rpc(f"fault_{name}", **arguments)
        self.reset_cache()
        try:
            yield
        finally:
            self.rpc(f"fault_{name}")
            self.reset_cache()

    @contextlib.contextmanager
    def adding_bos(self) -> Iterator[None]:
        """Put a BOS in front of every text for the duration of the block: another tokenizer."""
        self._post("/fault_bos", 1)
        try:
            yield
        finally:
            self._post("/fault_bos", 0)

    @contextlib.contextmanager
    def weights(self, folder: Path, *, reset_cache: bool = True) -> Iterator[None]:
        """Serve the weights of another directory for the duration of the block."""
        self.load_weights(folder, reset_cache=reset_cache)
        try:
            yield
        finally:
            self.load_weights(self.model)

    def load_adapter(self, folder: Path, name: str = ADAPTER) -> None:
        """Serve the adapter of a directory under this name; replace the one that has it."""
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        self._post("/v1/load_lora_adapter", body)

    # --- calls ------------------------------------------------------------------------------

    def rpc(self, method: str, **arguments: object) -> list[Any]:
        """Call a method of the worker."""
        answer = self._post("/collective_rpc", {"method": method, "kwargs": arguments})
        return list(answer["results"])

    def _post(self, path: str, body: Mapping[str, object] | int) -> Any:
        answer = httpx.post(self.url + path, json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, (
            f"{path}: {answer.status_code} {answer.text}\n{self.tail()}"
        )
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text

    def tail(self, lines: int = 40) -> str:
        """Return the end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def serving(
    model: Path,
    log: Path,
    *,
    dtype: str = "bfloat16",
    prefix_caching: bool = True,
    adapter: Path | None = None,
    tokenizer: Path | None = None,
    options: Sequence[str] = (),
) -> Iterator[VllmServer]:
    """Start vLLM on a free loopback port and end it.

    Args:
        model: a model directory.
        log: file for its output.
        dtype: in which it computes.
        prefix_caching: whether it has a prefix cache.
        adapter: directory of a LoRA adapter, served as "adapter"; None: LoRA is off.
        tokenizer: directory of another tokenizer than the model's.
        options: further arguments of its command line.
    """
    _require()
    port = _free_port()
    command = [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", NAME,
        "--tokenizer", str(tokenizer or model),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
        "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "512",
        "--max-num-seqs", "16", "--worker-extension-cls", "stagescope_extension.Extension",
        "--middleware", "stagescope_faults.Tokenizer", "--distributed-executor-backend", "uni",
        "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching",
        *options,
    ]  # fmt: skip
    own = dict(os.environ) | _ENVIRONMENT
    if adapter is not None:
        own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        command += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2",
                    "--lora-modules", f"{ADAPTER}={adapter}"]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=own, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
        )
    closing = contextlib.ExitStack()
    server = VllmServer(f"http://127.0.0.1:{port}", model, log, closing)
    try:
        with closing:
            _wait(server, process)
            yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _require() -> None:
    made = PYTHON if "VLLM_PYTHON" in os.environ else _OWN / "installed"
    if made.exists():
        return
    text = f"there is no {made}: `make test-vllm` makes it, or set VLLM_PYTHON"
    if os.environ.get("TEST_VLLM") == "required":
        pytest.fail(text)
    pytest.skip(text)


def _wait(server: VllmServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(
                f"vLLM ended with {process.returncode} before it was ready\n{server.tail()}"
            )
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    pytest.fail(f"vLLM was not ready after {_START_SECONDS:.0f} s\n{server.tail()}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
