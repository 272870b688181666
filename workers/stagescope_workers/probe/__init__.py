"""The probe: what a training process calls, and what it does beside the training."""
