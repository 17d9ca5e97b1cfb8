"""DAG Worker: one process bound to one device builds its roles and runs its chain."""
