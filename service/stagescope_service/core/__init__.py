"""The state machine: pure functions and objects, without I/O, clocks or Ray."""
