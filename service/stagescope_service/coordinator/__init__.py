"""The coordinator: takes in events and polls, carries out instructions, answers commands."""
