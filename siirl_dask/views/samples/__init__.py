"""Samples of a run, as HTML and in a terminal."""
