"""The tests; a package, since some distributions (verl's) install one of this name."""
