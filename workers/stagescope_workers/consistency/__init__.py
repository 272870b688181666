"""Rollout consistency: compares the log-probs of an inference engine with those of transformers.

`stagescope consistency` is the command; `compare` is its function on open engines. Only
`transformers_engine` needs torch and transformers, and `ctranslate2_engine` ctranslate2.
"""
