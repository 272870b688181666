"""Rollout consistency: the same prompts and tokens through an engine and through transformers.

`stagescope consistency` is the command; `compare` does its work on engines that are open. Only
`transformers_engine` needs torch and transformers, and `ctranslate2_engine` ctranslate2.
"""
