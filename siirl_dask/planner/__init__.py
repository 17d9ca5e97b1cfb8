"""DAG Planner: a DAG and a placement become one chain of links per worker. Pure Python: no dask, no torch."""

from siirl_dask.planner.chain import Chain, Drop, Edge, Input, Keep, Link, Load, Plan, Recv, Run, Send
from siirl_dask.planner.compile import compile_chains
from siirl_dask.planner.dag import DAG, Contract, Node, Role, Rows, columns
from siirl_dask.planner.describe import describe
from siirl_dask.planner.estimate import Estimate, Sizes, estimate
from siirl_dask.planner.flow import DATA, Stage, trace
from siirl_dask.planner.spec import dag_from_spec, dag_to_spec, resolve

__all__ = [
    "DAG",
    "DATA",
    "Chain",
    "Contract",
    "Drop",
    "Edge",
    "Estimate",
    "Input",
    "Keep",
    "Link",
    "Load",
    "Node",
    "Plan",
    "Recv",
    "Role",
    "Rows",
    "Run",
    "Send",
    "Sizes",
    "Stage",
    "columns",
    "compile_chains",
    "dag_from_spec",
    "dag_to_spec",
    "describe",
    "estimate",
    "resolve",
    "trace",
]
