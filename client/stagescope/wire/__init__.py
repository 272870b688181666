"""What workers, service and client exchange: events, captures, keep configurations and errors."""
