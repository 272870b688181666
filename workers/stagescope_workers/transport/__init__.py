"""Brings a process's events and payloads to the service, by Ray calls or over HTTP."""
