"""The HTTP side of the service: it reads the store, and asks the engine for what changes."""
