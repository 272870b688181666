"""Forward what the service knows of a run into trackers: `stagescope forward`, `Session.forward`.

`records` reads closed steps and findings from the API. `trackers` and `traces` write them with each
tool's own client. `forwarder` decides what to write and when, and remembers it.
"""
