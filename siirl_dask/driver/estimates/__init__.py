"""Estimates of memory and seconds before a run, and what a run that was measured says of them."""
