"""The report of a run or a step: one content, as JSON, as Markdown and as one HTML file."""
