"""DAG Planner: a DAG and a placement become one chain of links per worker. Pure Python: no dask, no torch."""

from siirl_dask.planner.chain import Behind, Chain, Drop, Edge, Input, Keep, Link, Load, Plan, Recv, Run, Send, Stream
from siirl_dask.planner.compile import compile_chains
from siirl_dask.planner.contract import Contract, columns
from siirl_dask.planner.dag import DAG, Node, Role, Rows
from siirl_dask.planner.describe import describe
from siirl_dask.planner.draw import draw
from siirl_dask.planner.estimate import Estimate, estimate
from siirl_dask.planner.flow import DATA, Stage, trace
from siirl_dask.planner.functions import resolve
from siirl_dask.planner.listing import as_data
from siirl_dask.planner.memory import Usage, usage
from siirl_dask.planner.spec import dag_from_spec, dag_to_spec
from siirl_dask.planner.widths import Sizes

__all__ = [
    "DAG",
    "DATA",
    "Behind",
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
    "Stream",
    "Usage",
    "as_data",
    "columns",
    "compile_chains",
    "dag_from_spec",
    "dag_to_spec",
    "describe",
    "draw",
    "estimate",
    "resolve",
    "trace",
    "usage",
]
