"""Messages between workers: over Unix sockets within a host, over Dask's comms between hosts."""
