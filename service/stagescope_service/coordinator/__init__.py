"""The coordinator: receives events and polls, carries out instructions, answers commands."""
