"""What views read with: the collaborators, targets, completeness, step summaries, rows."""
