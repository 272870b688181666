"""The server of the Model Context Protocol: tools, the reports of runs, and a prompt."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import anyio.to_thread
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from stagescope import __version__
from stagescope.cli.agents import replies
from stagescope.cli.agents.prompts import INSTRUCTIONS, PROMPTS, prompt_text
from stagescope.cli.agents.tools import Tool
from stagescope.session import Session
from stagescope_wire.errors import StagescopeError
from stagescope_wire.names import unknown_name
from stagescope_wire.nonfinite import Json, JsonObject

SessionOf: TypeAlias = Callable[[object | None], Session]
"""Returns the session with which a request is answered; None: it came over stdio."""
_Context: TypeAlias = ServerRequestContext[Any, Any]
_REPORT: Final = "stagescope://runs/{run}/report"
_REPORTS_LISTED: Final = 20
_FROM_LINE: Final[JsonObject] = {
    "type": "integer", "minimum": 0, "default": 0,
    "description": "First line of the answer, to go on where a long one was cut.",
}  # fmt: skip


def make_server(session_of: SessionOf, tools: Mapping[str, Tool]) -> Server[Any]:
    """Return a server that answers from a session.

    Args:
        session_of: returns the session of a request. The service checks its access token.
        tools: the tools by name.
    """
    answers = _Answers(session_of, tools)
    return Server(
        "stagescope",
        version=__version__,
        title="stagescope: RL post-training, from symptom to cause",
        instructions=INSTRUCTIONS,
        on_list_tools=answers.list_tools,
        on_call_tool=answers.call_tool,
        on_list_resources=answers.list_resources,
        on_list_resource_templates=answers.list_templates,
        on_read_resource=answers.read_resource,
        on_list_prompts=answers.list_prompts,
        on_get_prompt=answers.get_prompt,
    )


class _Answers:
    """The handlers of requests; each asks the service in a thread."""

    def __init__(self, session_of: SessionOf, tools: Mapping[str, Tool]) -> None:
        self._session_of = session_of
        self._tools = tools

    async def list_tools(self, _: _Context, __: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(tool) for tool in self._tools.values()])

    async def call_tool(
        self, context: _Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        text, is_error = await anyio.to_thread.run_sync(
            functools.partial(
                self._call, context.request, params.name, dict(params.arguments or {})
            )
        )
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=text)], is_error=is_error
        )

    def _call(
        self, request: object | None, name: str, arguments: dict[str, Json]
    ) -> tuple[str, bool]:
        try:
            if name not in self._tools:
                raise unknown_name(name, [*self._tools], what="tool")
            session = self._session_of(request)
            first = arguments.pop("from_line", 0)
            answer = self._tools[name].ask(session, arguments)
            from_line = first if isinstance(first, int) else 0
            return replies.reply(name, arguments, answer, session.url, from_line), False
        except StagescopeError as error:
            return replies.refusal(error), True

    async def list_resources(self, context: _Context, _: object) -> types.ListResourcesResult:
        def newest() -> Sequence[Json]:
            return self._session_of(context.request).runs(limit=_REPORTS_LISTED)["run"]

        try:
            runs = await anyio.to_thread.run_sync(newest)
        except StagescopeError as error:
            raise _protocol_error(error) from error
        return types.ListResourcesResult(
            resources=[
                types.Resource(
                    uri=_REPORT.format(run=run), name=f"report of {run}", mime_type="text/markdown"
                )
                for run in runs
            ]
        )

    async def list_templates(self, _: _Context, __: object) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            uri_template=_REPORT, name="report", mime_type="text/markdown",
            description="What is known of a run: verdicts, tables, advice.",
        )  # fmt: skip
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_resource(
        self, context: _Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        uri = str(params.uri)
        head, tail = _REPORT.split("{run}")
        if not (uri.startswith(head) and uri.endswith(tail)):
            raise MCPError(types.INVALID_PARAMS, f"no resource {uri!r:.200}; expected {_REPORT}")
        run = uri.removeprefix(head).removesuffix(tail)
        try:
            text = await anyio.to_thread.run_sync(self._report, context.request, run)
        except StagescopeError as error:
            raise _protocol_error(error) from error
        content = types.TextResourceContents(uri=uri, mime_type="text/markdown", text=text)
        return types.ReadResourceResult(contents=[content])

    def _report(self, request: object | None, run: str) -> str:
        with tempfile.TemporaryDirectory("-stagescope") as directory:
            path = Path(directory, "report.md")
            self._session_of(request).save_report(path, run)
            return replies.document(path.read_text("utf-8"))

    async def list_prompts(self, _: _Context, __: object) -> types.ListPromptsResult:
        run = types.PromptArgument(name="run", description="Name of the run.", required=False)
        return types.ListPromptsResult(
            prompts=[
                types.Prompt(name=name, description=text, arguments=[run])
                for name, text in PROMPTS.items()
            ]
        )

    async def get_prompt(
        self, _: _Context, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult:
        if params.name not in PROMPTS:
            raise MCPError(types.INVALID_PARAMS, f"no prompt {params.name!r:.100}")
        text = prompt_text(str((params.arguments or {}).get("run") or ""))
        message = types.PromptMessage(
            role="user", content=types.TextContent(type="text", text=text)
        )
        return types.GetPromptResult(description=PROMPTS[params.name], messages=[message])


def _described(tool: Tool) -> types.Tool:
    schema = {**tool.schema, "properties": {**tool.schema["properties"], "from_line": _FROM_LINE}}
    return types.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=schema,
        annotations=types.ToolAnnotations(
            read_only_hint=not tool.changes, destructive_hint=False, open_world_hint=False
        ),
    )


def _protocol_error(error: StagescopeError) -> MCPError:
    return MCPError(types.INVALID_PARAMS, replies.refusal(error))
