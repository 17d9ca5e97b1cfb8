"""The layout decides which worker owns which row: balanced by tokens, and computed alike by
every worker.
"""

__all__ = ["assignment"]
