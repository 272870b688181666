"""Hangs: watches for stuck ranks and for processes that do not answer."""
