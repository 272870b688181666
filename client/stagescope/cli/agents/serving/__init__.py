"""The server over stdio and HTTP: the modules that import the protocol's SDK (extra `mcp`)."""
