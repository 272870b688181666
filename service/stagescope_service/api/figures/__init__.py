"""Figures for the page, the notebook and reports: each file reads its data and draws it.

`info` reads what a figure shows into a frozen dataclass, `figure` draws that. A number that was not
measured is None in the dataclass and a gap in the figure, with its reason beside it; one that is
not finite is a mark.
"""
