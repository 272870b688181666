"""What workers, service and client exchange: events, captures, keep configurations and errors."""

__version__ = "0.1.0"
