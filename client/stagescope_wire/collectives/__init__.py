"""Collectives of torch.distributed: what ranks recorded, and which of them cannot finish."""
