"""The shared format of workers, service and client: events, captures, keep settings and errors."""

__version__ = "0.1.0"
