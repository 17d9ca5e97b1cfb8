"""Rows that travel before their node has made the others: at their source, and where they
arrive.
"""
