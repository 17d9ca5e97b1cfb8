"""Runs an engine in a process of its own, which its worker starts and owns (``rollout.process``)."""
