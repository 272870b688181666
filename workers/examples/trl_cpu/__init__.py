"""TRL's GRPO on CPU, without a line of stagescope: `stagescope run` attaches it."""
