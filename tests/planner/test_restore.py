"""A DAG that is cut at a stored table does what is left of a step, and takes nothing but what
the table holds.
"""

from dataclasses import replace

import pyarrow as pa
import pytest

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.errors import PlanError
from siirl_dask.planner import (
    DAG,
    NO_DATA,
    ContractChanges,
    KeptRows,
    LoadPrompts,
    Node,
    Restore,
    Role,
    Save,
    SaveState,
    columns,
    compile_chains,
    cuts_at_stored,
    dag_from_spec,
    dag_to_spec,
    run_again,
)

SOURCE = pa.schema({"prompt": pa.string(), "answer": pa.string()})
FLOAT = pa.float32()


def build(device, rank): ...


@columns(reads=["prompt"], writes={"text": pa.string()}, new_rows=True)
def sample(ctx, table): ...


@columns(reads=["prompt"], writes={"text": pa.string()}, new_rows=True)
def draft(ctx, table): ...


@columns(reads=["text"], writes={"reward": FLOAT})
def judge(ctx, table): ...


@columns(reads=["reward"], writes={"reward": FLOAT})
def shape(ctx, table): ...


@columns(reads=["reward"], writes={"coefficient": FLOAT}, stateful=True)
def adapt(ctx, table): ...


@columns(reads=["reward", "text"], stateful=True)
def update(ctx, table): ...


@columns(reads=["text"])
def look(ctx, table): ...


def dag(*nodes):
    roles = (Role("engine", build), Role("policy", build))
    return DAG(roles, nodes)


SAMPLE = Node("sample", sample, role="engine")
JUDGE = Node("judge", judge, role="engine", after="sample")
SHAPE = Node("shape", shape, role="policy", after="judge", save_as="rollouts")
UPDATE = Node("update", update, role="policy", after="shape")


def names(cut):
    return [node.name for node in cut.dag.nodes]


def links(cut, kind, workers=("a", "b")):
    plan = compile_chains(cut.dag, workers, NO_DATA)
    return [link for chain in plan.chains.values() for link in chain.flat if isinstance(link, kind)]


def test_what_comes_after_the_saved_table_is_left_and_the_dataset_is_not_read():
    (cut,) = cuts_at_stored(dag(SAMPLE, JUDGE, SHAPE, UPDATE), SOURCE)
    assert (names(cut), cut.table) == (["shape", "update"], "rollouts")
    assert links(cut, LoadPrompts) == []
    assert [(link.index, link.count) for link in links(cut, Restore)] == [(0, 2), (1, 2)]
    assert set(links(cut, Restore)[0].schema.names) == {
        "row_id",
        "group_id",
        "tokens",
        "reward",
        "text",
    }


def test_a_node_before_the_table_that_changes_its_role_runs_again_on_the_stored_rows():
    adapting = Node("adapt", adapt, role="policy", after="shape")
    saving = Node("last", look, role="policy", after="adapt", save_as="rollouts")
    shaping = Node("shape", shape, role="policy", after="judge")
    (cut,) = cuts_at_stored(
        dag(
            SAMPLE,
            JUDGE,
            shaping,
            adapting,
            saving,
            Node("update", update, role="policy", after="last"),
        ),
        SOURCE,
    )
    assert names(cut) == ["last", "adapt", "update"]
    assert cut.dag.node("adapt").after == ("last",)
    assert links(cut, Save) == []


def test_a_node_that_reads_what_the_table_has_no_more_is_named():
    raw = Node("raw", update, role="policy", after="judge")
    with pytest.raises(
        PlanError, match="node 'raw' takes 'reward' as 'judge' makes it, which table 'rollouts'"
    ):
        cuts_at_stored(dag(SAMPLE, JUDGE, SHAPE, UPDATE, raw), SOURCE)


def test_of_two_saved_tables_the_one_that_is_enough_is_taken():
    early = Node("judge", judge, role="engine", after="sample", save_as="judged")
    raw = Node("raw", update, role="policy", after="judge")
    (cut,) = cuts_at_stored(dag(SAMPLE, early, SHAPE, UPDATE, raw), SOURCE)
    assert (cut.table, names(cut)) == ("judged", ["judge", "shape", "update", "raw"])
    assert [link.table for link in links(cut, Save, ["only"])] == ["rollouts"]


@pytest.mark.parametrize("config", ["quickstart", "quickstart_ppo", "quickstart_dapo"])
def test_every_shipped_dag_can_be_cut_behind_its_generation(config):
    file = load_config_file(shipped(config), [])
    own, _ = dags(file)
    cuts = cuts_at_stored(own, SOURCE)
    assert [(cut.table, cut.spent) for cut in cuts] == [
        ("rollouts", ("stages/rollout",)),
        ("stages/rollout", ()),
    ]
    furthest, nearest = map(names, cuts)
    assert furthest[0] == "advantage"
    assert not {"rollout", "prompts", "reward"} & set(furthest)
    assert nearest[0] == "rollout"
    assert {"reward", "old_logprobs", *furthest} <= set(nearest)
    assert "prompts" not in nearest
    assert not any(cut.generates for cut in cuts)
    assert [link.table for link in links(cuts[1], Save, ["only"])] == ["rollouts"]


def test_every_stored_table_that_is_enough_is_a_frontier_and_the_one_that_leaves_least_comes_first():
    # the last node, and little behind it
    aside = Node("aside", look, role="policy", after="sample", save_as="aside")
    early = Node("judge", judge, role="engine", after="sample", save_as="judged")
    staged = replace(SAMPLE, stage=True)
    cuts = cuts_at_stored(dag(staged, early, SHAPE, UPDATE, aside), SOURCE)
    assert [cut.table for cut in cuts] == ["rollouts", "aside", "judged", "stages/sample"]
    assert [cut.spent for cut in cuts] == [("stages/sample",)] * 3 + [()]
    assert [link.table for link in links(cuts[-1], Save, ["only"])] == [
        "judged",
        "rollouts",
        "aside",
    ]


def test_a_stage_from_which_no_step_can_go_on_is_not_written():
    """Half of what the update reads comes from rows that the stage does not hold."""
    other = Node("other", look, role="engine", after="prompts")
    prompts = Node("prompts", draft, role="engine")
    staged = replace(SAMPLE, after=("prompts",), stage=True)
    plan = compile_chains(dag(prompts, staged, JUDGE, SHAPE, UPDATE, other), ["a"], SOURCE)
    saved = [link.table for link in plan.chains["a"].flat if isinstance(link, Save)]
    assert saved == ["rollouts"]


def test_a_stage_travels_with_the_dag_and_decides_no_result():
    staged = dag(replace(SAMPLE, stage=True), JUDGE, SHAPE, UPDATE)
    again = dag_from_spec(**dag_to_spec(staged))
    assert again == staged
    assert again.node("sample").stage
    assert again != dag(SAMPLE, JUDGE, SHAPE, UPDATE)
    with pytest.raises(PlanError, match=r"node 'sample' has stage='yes': expected true or false"):
        replace(SAMPLE, stage="yes")
    with pytest.raises(PlanError, match="'stages' is the folder of stages: choose another name"):
        replace(SAMPLE, save_as="stages")
    with pytest.raises(
        PlanError, match="'trace' is the table of the run's trace: choose another name"
    ):
        replace(SAMPLE, save_as="trace")


def test_run_again_makes_anew_what_its_nodes_write_and_takes_the_rest_from_the_table():
    stored = pa.schema({"prompt": pa.string(), "text": pa.string(), "reward": FLOAT})
    cut = run_again(dag(SAMPLE, JUDGE, SHAPE, UPDATE), stored, "judge", "mine")
    assert names(cut) == ["stored", "judge", "shape"]
    assert [link.table for link in links(cut, Save, ["only"])] == ["mine"]
    assert "reward" not in links(cut, Restore)[0].schema.names
    assert {role.name for role in cut.dag.roles} == {"engine", "policy"}


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("sample", "node 'sample' makes rows of its own"),
        ("update", r"no rows are saved at node 'update' or after it: .*\{'shape': 'rollouts'\}"),
        ("shape", "node 'shape' takes 'reward' as 'judge' makes it, which table 'rollouts'"),
        ("jugde", "did you mean 'judge'"),
    ],
)
def test_what_cannot_run_again_is_refused_by_name(first, message):
    with pytest.raises(PlanError, match=message):
        run_again(dag(SAMPLE, JUDGE, SHAPE, UPDATE), SOURCE, first, "mine")


def kept(resource, **options): ...


@columns(
    reads=["prompt"],
    writes={"text": pa.string()},
    new_rows=True,
    depends_on_options=lambda **options: ContractChanges(carries=KeptRows(kept, kept)),
)
def sample_over_steps(ctx, table): ...


def test_what_a_node_keeps_for_later_steps_is_stored_where_a_step_can_go_on_from_its_rows():
    sampling = Node("sample", sample_over_steps, role="engine")
    placed = {"engine": [0, 1], "policy": [2]}

    def stored(*nodes):
        chains = compile_chains(dag(*nodes), ("a", "b", "c"), SOURCE, placed).chains
        return {
            worker: [
                (link.table, link.index, link.count)
                for link in chain.flat
                if isinstance(link, SaveState)
            ]
            for worker, chain in chains.items()
        }

    table = sampling.state_table
    assert stored(sampling, JUDGE, SHAPE, UPDATE) == {
        "a": [(table, 0, 2)],
        "b": [(table, 1, 2)],
        "c": [],
    }
    unsaved = Node("shape", shape, role="policy", after="judge")
    assert set(map(tuple, stored(sampling, JUDGE, unsaved, UPDATE).values())) == {()}
