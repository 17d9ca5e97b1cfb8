"""The distributed Databuffer: it publishes a worker's rows and pulls the rows that the next
layout assigns to it.
"""

__all__ = ["databuffer", "limits", "serving"]
