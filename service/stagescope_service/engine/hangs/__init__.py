"""Who is stuck, and with which stacks."""
