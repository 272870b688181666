"""The records of a step put together to one batch of whole rows."""
