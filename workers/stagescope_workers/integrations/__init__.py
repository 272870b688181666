"""What attaches the probe to trainers from outside: a room for each framework."""
