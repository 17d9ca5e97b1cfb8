"""Checkpoints, committed steps, restarts, other workers, a lost scheduler: a run goes on by
these.
"""
