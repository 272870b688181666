"""Orders on live runs: the plan, who is asked, when a capture starts."""
