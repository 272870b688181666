"""Files that torch.save wrote: read without running anything of them, or converted after asking."""
