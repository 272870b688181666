"""What the service keeps: a catalogue in SQL, tensors in safetensors files, a bounded ring."""
