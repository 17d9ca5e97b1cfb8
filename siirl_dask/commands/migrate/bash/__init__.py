"""Reads a bash script without running it: follows what is known, and lists what is not."""
