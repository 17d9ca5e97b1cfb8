"""Messages between workers: over Unix sockets within a host, over streams of Dask's comms
between hosts.
"""

__all__ = ["carriers", "messages", "peers"]
