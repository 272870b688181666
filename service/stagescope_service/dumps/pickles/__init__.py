"""Files that torch.save wrote, read without running anything of them."""
