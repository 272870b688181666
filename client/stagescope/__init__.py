"""stagescope: a debugging service for RL post-training on Ray (vocabulary and reading side)."""

__version__ = "0.1.0"
