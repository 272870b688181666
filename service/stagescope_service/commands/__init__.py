"""The service's own commands, which join `stagescope` by the entry-point group."""
