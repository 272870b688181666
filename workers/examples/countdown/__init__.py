"""A complete training on the CPU that reports to stagescope: see README.md in this folder."""
