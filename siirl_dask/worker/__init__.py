"""DAG Worker: one process bound to one device, which builds its roles and runs its chain."""
