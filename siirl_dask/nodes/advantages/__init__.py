"""Nodes that estimate advantages, and those that change rewards before."""
