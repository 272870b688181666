"""Storage of the service: a catalogue in SQL, tensors in safetensors files, a bounded ring."""
