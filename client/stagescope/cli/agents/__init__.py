"""The questions of the command line for coding agents, by the Model Context Protocol.

`command` is `stagescope mcp`. `tools` makes tools of commands, `replies` bounds and marks their
answers, and `serving` serves both.
"""
