"""DAG Worker: one process bound to one device builds its roles and runs its chain."""

__all__ = [
    "dag_worker",
    "hardware",
    "monitoring",
    "peers",
    "process",
    "release",
    "roles",
    "run_spec",
    "stop",
    "tasks",
]
