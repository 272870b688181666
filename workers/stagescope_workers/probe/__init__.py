"""The probe: the calls of a training process, and the work beside the training."""
