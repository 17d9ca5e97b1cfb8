"""Nodes that choose tokens for the loss, by numbers of the tokens of all workers."""
