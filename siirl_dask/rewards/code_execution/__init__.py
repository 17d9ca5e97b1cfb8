"""Rewards that run a response's program against test cases, in a sandbox."""
