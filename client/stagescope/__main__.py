"""The command line as a module, where the script `stagescope` is not on the path."""

from __future__ import annotations

from stagescope.cli import main

if __name__ == "__main__":
    main(prog_name="python -m stagescope")
