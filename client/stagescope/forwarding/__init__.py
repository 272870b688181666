"""Forward what the service knows of a run into trackers: `stagescope forward`, `Session.forward`.

`records` reads closed steps and findings from the API, `trackers` and `traces` write them by each
tool's own client, and `forwarder` decides what is written, when, and remembers it.
"""
