"""The server over the stdin and stdout of the process that an agent started."""

from __future__ import annotations

import anyio
from mcp.server.stdio import stdio_server

from stagescope.cli.agents.serving.server import make_server
from stagescope.cli.agents.tools import tools_of
from stagescope.session import Session


def serve(session: Session, *, operate: bool) -> None:
    """Serve until stdin ends."""
    server = make_server(lambda _: session, tools_of(operate=operate, is_remote=False))

    async def run() -> None:
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    anyio.run(run)
