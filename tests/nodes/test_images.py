"""Nodes that sample give requests the images of their prompts, however often a group's rows are
split up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from siirl_storage import commit_parts, stage_part

from siirl_dask.config import RolloutConfig, ValidationConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import ImageError
from siirl_dask.images import Image
from siirl_dask.nodes import generate, generate_answers, generate_with_greedy
from siirl_dask.nodes.prompts import MAX_TOKENS
from siirl_dask.planner.contract import contract_of
from siirl_dask.rollout import FinishReason, Generation
from siirl_dask.schema import TYPES
from siirl_dask.tables.stored_rows import read_kept_rows

SHOWN = [(), (Image(b"one"),), (Image(b"two"), Image(None, "s3://three"))]


@dataclass
class Seeing:
    """Notes the images of each prompt; responses have three tokens."""

    version: int = 0
    processor: object = "one"
    seen: dict = field(default_factory=dict)
    requests: list = field(default_factory=list)

    class tokenizer:
        @staticmethod
        def decode(token_ids, *, skip_special):
            return str(token_ids)

        @staticmethod
        def plain_text(token_ids):
            return None

    def serve(self, queue):
        while taken := queue.next(9, wait=True):
            for ticket, asked in taken:
                self.requests.append(asked)
                self.seen.setdefault(asked.prompt[0], set()).add(asked.images)
                count = asked.sampling.max_tokens
                queue.complete(ticket, Generation([7] * count, [-1.0] * count, FinishReason.LENGTH))


def prompts(images=SHOWN):
    ids = pa.array(range(len(images)), pa.int64())
    shown = [[{"bytes": image.data, "path": image.path} for image in row] for row in images]
    given = {
        "row_id": ids,
        "group_id": ids,
        "tokens": ids,
        "prompt_ids": [[i, 5] for i in range(len(images))],
    }
    return pa.table(
        {name: pa.array(values, TYPES[name]) for name, values in {**given, "images": shown}.items()}
    )


def context(engine, state=None, *, step=1, drain=False):
    state = {} if state is None else state
    return Context(
        step=step,
        run_seed=0,
        rank=Rank(),
        device=Device("w"),
        resource=engine,
        state=state,
        drain=drain,
    )


def expected():
    return {row: {images} for row, images in enumerate(SHOWN)}


@pytest.mark.parametrize("node", [generate, generate_with_greedy, generate_answers])
def test_requests_show_the_images_of_their_prompts_which_a_group_shares(node):
    engine, rollout = Seeing(), RolloutConfig(n=3, max_response_length=3)
    options = {"validation": ValidationConfig(n=2)} if node is generate_answers else {}
    made = node(context(engine), prompts(), rollout=rollout, **options)
    assert engine.seen == expected()
    assert made["images"].to_pylist() == [
        prompts()["images"][group.as_py()].as_py() for group in made["group_id"]
    ]
    objects = {}
    for asked in engine.requests:
        objects.setdefault(asked.prompt[0], set()).add(tuple(map(id, asked.images)))
    assert all(len(found) == 1 for found in objects.values()), (
        "an image would be read once for each sample"
    )


def test_responses_that_go_on_later_show_their_images_again_also_from_storage(tmp_path):
    rollout = RolloutConfig(
        n=2, max_response_length=3, max_staleness=8, partial=True, max_tokens_per_step=1
    )
    carries, first = contract_of(partial(generate, rollout=rollout)).carries, context(Seeing())
    assert generate(first, prompts(), rollout=rollout).num_rows == 0
    folder = str(tmp_path / "kept")
    commit_parts(folder, 1, [stage_part(folder, 1, 0, carries.pack(first, rollout=rollout))])
    later, resumed = (
        context(Seeing(), first.state, step=2, drain=True),
        context(Seeing(), step=2, drain=True),
    )
    carries.unpack(resumed, read_kept_rows(folder, 0, 1, 2**20), rollout=rollout)
    for ctx in (later, resumed):
        ended = generate(ctx, prompts([]), rollout=rollout)
        assert (ended.num_rows, ctx.resource.seen) == (6, expected())
        assert {asked.begun for asked in ctx.resource.requests} == {1}


def test_parts_of_responses_show_their_images_again_in_a_step_and_in_later_ones(tmp_path):
    """The first step of a window takes the one group that needs one part alone."""
    rollout = RolloutConfig(
        n=2, max_response_length=40, max_staleness=1, steps_ahead=0, window=len(SHOWN) - 1
    )
    limits = pa.array([40, 40, 16], pa.int64())
    given = prompts().append_column(MAX_TOKENS, limits)
    carries = contract_of(partial(generate, rollout=rollout)).carries
    first = context(Seeing())
    taken = generate(first, given, rollout=rollout)
    assert taken["prompt_ids"].to_pylist() == [[2, 5]] * 2
    assert first.resource.seen == expected()
    folder = str(tmp_path / "kept")
    commit_parts(folder, 1, [stage_part(folder, 1, 0, carries.pack(first, rollout=rollout))])
    later = context(Seeing(), first.state, step=2, drain=True)
    resumed = context(Seeing(), step=2, drain=True)
    carries.unpack(resumed, read_kept_rows(folder, 0, 1, 2**20), rollout=rollout)
    for ctx in (later, resumed):
        ended = generate(ctx, given.slice(0, 0), rollout=rollout)
        assert [len(ids) for ids in ended["response_ids"].to_pylist()] == [40] * 4
        assert ctx.resource.seen == {row: {SHOWN[row]} for row in (0, 1)}
        assert {asked.begun for asked in ctx.resource.requests} == {16, 32}


def test_a_column_of_this_name_is_any_column_to_an_engine_of_texts_alone():
    engine, rollout = Seeing(processor=None), RolloutConfig(n=1, max_response_length=1)
    generate(context(engine), prompts(), rollout=rollout)
    other = prompts().set_column(4, "images", pa.array(["a", "b", "c"]))
    assert generate(context(engine), other, rollout=rollout)["images"].to_pylist() == [
        "a",
        "b",
        "c",
    ]
    assert engine.seen == {row: {()} for row in range(3)}


def test_rows_without_the_column_show_nothing_and_a_null_image_is_refused():
    engine, rollout = Seeing(), RolloutConfig(n=1, max_response_length=1)
    generate(context(engine), prompts().drop_columns(["images"]), rollout=rollout)
    assert engine.seen == {row: {()} for row in range(3)}
    broken = prompts().set_column(4, "images", pa.array([[None]] * 3, TYPES["images"]))
    with pytest.raises(ImageError, match="null"):
        generate(context(Seeing()), broken, rollout=rollout)


def test_samples_of_a_prompt_do_not_copy_its_images():
    many = prompts([(Image(np.random.default_rng(0).bytes(10**6)),)])
    made = generate(context(Seeing()), many, rollout=RolloutConfig(n=8, max_response_length=1))
    addresses = {chunk.flatten().field(0).buffers()[2].address for chunk in made["images"].chunks}
    assert len(addresses) == 1
