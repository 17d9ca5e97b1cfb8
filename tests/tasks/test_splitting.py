"""The two agents' task: halves in the order in which they stand, and a warm start that is judged
by what is sampled.
"""

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.tasks import splitting
from siirl_dask.tasks.sorting import task_in
from siirl_dask.tasks.splitting import ask_to_sort, halves


@given(st.text("0123456789", min_size=6, max_size=6))
def test_the_halves_are_the_digits_the_low_ones_first_and_each_in_their_order(digits):
    low, high = (part.split() for part in halves(digits).split(" | "))
    assert sorted(low) + sorted(high) == sorted(digits)
    left = iter(digits)
    assert all(digit in left for digit in low)


def test_the_second_agent_sees_the_first_ones_line_and_no_more():
    assert halves("529147") == "2 1 4 | 5 9 7"
    assert (
        ask_to_sort(prompt="Split: 5 2 9 1 4 7 =", response=" 2 1 4 | 5 9 7")
        == "Sort: 2 1 4 | 5 9 7 ="
    )


def test_the_task_is_prompts_of_the_first_and_answers_of_the_last_agent(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        "siirl_dask.tasks.warm_start.warm_start",
        lambda folder, shown, held_out, **how: started.append(
            (folder.name, shown[0], how["accuracy"], how["sampled"])
        ),
    )
    monkeypatch.setattr(splitting, "_DEMONSTRATIONS", 64)
    splitting.write_splitting_task(tmp_path, seed=3)
    assert [(name, chance, sampled) for name, _, chance, sampled in started] == [
        (".a", 0.4, True),
        (".b", 0.4, True),
    ]
    (_, (split, line), *_), (_, (asked, answer), *_) = started
    assert asked == ask_to_sort(response=line)
    assert sorted(answer.split()) == sorted(split.removeprefix("Split:").removesuffix("=").split())
    tables = [
        pq.read_table(getattr(task_in(tmp_path), name)) for name in ("train", "validation", "test")
    ]
    assert [table.num_rows for table in tables] == [4096, 256, 512]
    prompts = [prompt for table in tables for prompt in table["prompt"].to_pylist()]
    assert len({*prompts, split}) == len(prompts) + 1
    assert tables[0]["answer"][0].as_py().split() == sorted(
        prompts[0].removeprefix("Split:").split("=")[0].split()
    )
    assert (tmp_path / "a" / "config.json").exists()
    assert (tmp_path / "b" / "config.json").exists()


@pytest.mark.sweep
def test_a_warm_start_ends_when_the_right_line_is_sampled_as_often_as_asked_for(tmp_path):
    reached = []
    splitting.write_splitting_task(
        tmp_path, chance=0.1, progress=lambda step, most, chance: reached.append(chance)
    )
    assert reached[-1] >= 0.1
    assert min(reached) < 0.05
