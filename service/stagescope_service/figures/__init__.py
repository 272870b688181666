"""Figures for the page, the notebook and reports: each file reads its data and draws it.

`info` reads a figure's data into a frozen dataclass, and `figure` draws it. A number that was not
measured is None in the dataclass and a gap in the figure, with its reason beside it. A number that
is not finite is a mark.
"""
