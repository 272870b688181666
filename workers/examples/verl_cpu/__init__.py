"""A complete verl training on CPU: verl's own V0 and V1 trainers on a tiny Qwen2."""
