"""Two or more things of one kind held against each other; arrays and tables in, verdicts out."""
