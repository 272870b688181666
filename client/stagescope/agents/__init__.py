"""The questions of the command line for coding agents, by the Model Context Protocol.

`stagescope mcp` starts the server. `tools` makes tools of commands, `replies` bounds and marks
their answers. `server` joins them, and `stdio` and `http` serve it.
"""
