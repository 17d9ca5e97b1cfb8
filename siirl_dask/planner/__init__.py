"""DAG Planner: a DAG and a placement become one chain of links per worker. Pure Python: no dask,
no torch.
"""

from siirl_dask.planner.chain import (
    Chain,
    Drop,
    EarlyColumns,
    Edge,
    Input,
    Lagged,
    Link,
    LoadPrompts,
    Plan,
    Recv,
    ReportTable,
    Restore,
    RunNode,
    Save,
    SaveState,
    Send,
    Stream,
)
from siirl_dask.planner.column_flow import DATA, NodeColumns, trace_columns
from siirl_dask.planner.compile import compile_chains
from siirl_dask.planner.contract import (
    Contract,
    ContractChanges,
    Groups,
    KeptRows,
    WeightSink,
    WeightSource,
    columns,
    reads_option,
)
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.explain.memory import TableUsage, usage
from siirl_dask.planner.explain.sizes import Estimate, TableSizes, estimate
from siirl_dask.planner.footprint import Card, Footprint, Remedy
from siirl_dask.planner.hosts import Hosts
from siirl_dask.planner.inputs import PlanInputs
from siirl_dask.planner.iteration import Iteration, Phase, phase_of, replay_plan
from siirl_dask.planner.node import Node, Role, Rows
from siirl_dask.planner.restore import (
    NO_DATA,
    Cut,
    cuts_at_stored,
    frontiers,
    run_again,
    saved_after,
)
from siirl_dask.planner.role_contract import Preflight, RoleCost, builds
from siirl_dask.planner.spec.dag_spec import dag_from_spec, dag_to_spec
from siirl_dask.planner.spec.names import resolve

__all__ = [
    "DAG",
    "DATA",
    "NO_DATA",
    "Card",
    "Chain",
    "Contract",
    "ContractChanges",
    "Cut",
    "Drop",
    "EarlyColumns",
    "Edge",
    "Estimate",
    "Footprint",
    "Groups",
    "Hosts",
    "Input",
    "Iteration",
    "KeptRows",
    "Lagged",
    "Link",
    "LoadPrompts",
    "Node",
    "NodeColumns",
    "Phase",
    "Plan",
    "PlanInputs",
    "Preflight",
    "Recv",
    "Remedy",
    "ReportTable",
    "Restore",
    "Role",
    "RoleCost",
    "Rows",
    "RunNode",
    "Save",
    "SaveState",
    "Send",
    "Stream",
    "TableSizes",
    "TableUsage",
    "WeightSink",
    "WeightSource",
    "builds",
    "columns",
    "compile_chains",
    "cuts_at_stored",
    "dag_from_spec",
    "dag_to_spec",
    "estimate",
    "frontiers",
    "phase_of",
    "reads_option",
    "replay_plan",
    "resolve",
    "run_again",
    "saved_after",
    "trace_columns",
    "usage",
]
