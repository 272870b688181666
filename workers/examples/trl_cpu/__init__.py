"""TRL's GRPO on CPU, which does not know of stagescope: `stagescope run` attaches it."""
