"""Trainers of general use, with what attaches them to stagescope: a few lines in each."""
