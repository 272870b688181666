"""What msprobe collected of operators, held against each other."""
