"""Folders of runs that never ran: what the readers of a run are given, in a moment."""

from dataclasses import replace
from functools import cache

import pyarrow as pa
from siirl_storage import commit_parts, join, open_fs, stage_part, write_atomic

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.observe import Accuracy, BytesPerStep, Slowest, Status, Summary, write_summary
from siirl_dask.observe.metrics import METRICS_FILE, Record, encode
from siirl_dask.observe.trace.trace_table import trace_table
from siirl_dask.planner import Phase
from siirl_dask.runs.attempt_folder import FOLDER
from siirl_dask.runs.folder import CONFIG_FILE, DAG_FILE, write_identity
from siirl_dask.runs.owner import Owner
from siirl_dask.trace import Entry, Lane

SECOND = 10**9
APART = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3]}"


_NOWHERE = "memory://a-run-that-was-written"


def begin_run(url, *overrides):
    """Write configuration and DAG of a quickstart on four workers, two of which learn. Return
    the URL as text.
    """
    fs, path = open_fs(str(url))
    for name, text in _identity(overrides).items():
        write_atomic(fs, f"{path}/{name}", text.replace(_NOWHERE.encode(), str(url).encode()))
    return str(url)


@cache
def _identity(overrides):
    """Return the files of such a run; it takes half a second to make a configuration, and many
    tests need the same.
    """
    given = [
        "data.prepare=null",
        "data.url=none",
        "validation.url=null",
        "validation.test_url=null",
        "run.steps=60",
    ]
    given += [
        f"run.url={_NOWHERE}",
        "model.path=none",
        "rollout.engine=transformers",
        APART,
        *overrides,
    ]
    file = load_config_file(shipped("quickstart.yaml"), given)
    write_identity(file.config, dags(file)[0], replace=True)
    fs, path = open_fs(_NOWHERE)
    return {name: fs.cat_file(f"{path}/{name}") for name in (CONFIG_FILE, DAG_FILE)}


def train_record(step, seconds=2.0, **metrics):
    told = {
        "reward/mean": min(1.0, step / 50),
        "samples": 256.0,
        "tokens": 7168.0,
        "response/length": 11.0,
    }
    told |= {
        "data/prompts": 32.0,
        "bytes/peers": 2e6,
        "policy/entropy": 0.3,
        "tokens_per_second": 3584.0,
    }
    return Record(step=step, phase=Phase.TRAIN, seconds=seconds, metrics=told | metrics)


def validation_record(step, reward):
    return Record(step=step, phase=Phase.VALIDATION, seconds=0.5, metrics={"reward/mean": reward})


def write_metrics(url, records, attempts=()):
    """Write all of metrics.jsonl at once; ``MetricsLog`` makes sure of every line on a disk."""
    fs, path = open_fs(join(str(url), METRICS_FILE))
    numbered = zip(records, attempts or [1] * len(records), strict=True)
    write_atomic(fs, path, b"".join(encode(record, attempt) for record, attempt in numbered))


def summary_of(**values):
    told = {
        "run_id": "quickstart",
        "status": Status.COMPLETE,
        "steps": 60,
        "workers": 4,
        "seconds": 91.9,
        "samples_per_second": 167.1,
        "validation": Accuracy(first=0.46, last=0.91, test=0.94),
        "bytes_per_step": BytesPerStep(peers=2.7e6, scheduler_and_client=53_000.0),
        "slowest": Slowest(node="update", worker="2", share=0.36, times_others=1.1, steps=16),
    }
    return Summary(**(told | values))


def end_run(url, **values):
    write_summary(str(url), summary_of(**values))


def start_run(url, number=1, *, beat=b"ended\n", lease=30.0):
    """Write a start of another machine, and its sign of life."""
    fs, folder = open_fs(join(str(url), FOLDER))
    owner = replace(
        Owner.here(lease),
        host="elsewhere",
        machine="another system",
        started="2026-11-23 07:20:05 UTC",
    )
    write_atomic(fs, f"{folder}/{number:04d}.json", owner.to_json())
    write_atomic(fs, f"{folder}/{number:04d}.beat", beat)


def write_trace(url, step, *, slow=1.0, memory=None):
    """Write what four workers did: 0 and 1 generate for a second, worker 1 ``slow`` times as
    long; 2 and 3 learn.
    """
    at = step * 100 * SECOND
    for worker in range(4):
        entries = []

        def add(lane, what, name, start, seconds, amount=None, entries=entries):
            span = at + round(start * SECOND), round(seconds * SECOND)
            entries.append(Entry(lane, what, name, False, "train", step, *span, amount))

        generated = slow if worker == 1 else 1.0
        last = max(1.0, slow)
        if worker < 2:
            add(Lane.COMPUTE, "node", "rollout", 0, generated, memory)
            add(Lane.TRANSFER, "publish", "rollout->old_logprobs", generated, 0.01)
            add(
                Lane.WAIT,
                "weights",
                "weights->load_weights",
                generated + 0.01,
                last + 2 - generated,
            )
            add(Lane.TRANSFER, "weights", "weights->load_weights", last + 2.01, 0.09, 1_000_000)
        else:
            add(Lane.WAIT, "rows", "rollout->old_logprobs", 0, last + 0.01)
            add(Lane.TRANSFER, "receive", "rollout->old_logprobs", last + 0.01, 0.04, 15_000)
            add(Lane.COMPUTE, "node", "old_logprobs", last + 0.05, 0.5, memory)
            add(Lane.COMPUTE, "node", "update", last + 0.6, 1.4, memory and 2 * memory)
        add(Lane.CONTROL, "task", "train", 0, last + 2.1)
        stage_part(
            f"{url}/trace/step={step:06d}", 1, worker, trace_table(entries, str(worker), "boot", 0)
        )


def save_rows(url, table, step, rows, attempt=1):
    """Save ``(prompt, answer, response, reward)`` of a step, two rows of each prompt in a group."""
    columns = {
        "row_id": pa.array(range(len(rows))),
        "group_id": pa.array([at // 2 for at in range(len(rows))]),
        "data_part": pa.array([0] * len(rows), pa.int32()),
        "data_row": pa.array([at // 2 for at in range(len(rows))]),
        "tokens": pa.array([9] * len(rows)),
        "prompt_ids": pa.array([[1, 2]] * len(rows), pa.large_list(pa.int32())),
        **{
            name: pa.array([row[at] for row in rows])
            for at, name in enumerate(("prompt_text", "answer", "response"))
        },
        "reward": pa.array([row[3] for row in rows], pa.float32()),
    }
    folder = f"{url}/{table}/step={step:06d}"
    commit_parts(folder, attempt, [stage_part(folder, attempt, 0, pa.table(columns))])


def whole_run(url, *overrides, steps=10, traced=3, memory=None):
    """Write all that a run of some steps leaves behind, the newest of them traced, and return
    its URL as text.
    """
    begin_run(url, *overrides)
    start_run(url)
    records = [train_record(step) for step in range(1, steps + 1)]
    write_metrics(url, [validation_record(0, 0.46), *records, validation_record(steps, 0.91)])
    for step in range(max(1, steps - traced + 1), steps + 1):
        write_trace(url, step, slow=1.5, memory=memory)
    save_rows(
        url,
        "validation",
        0,
        [("Sort: 2 1 =", "1 2", "2 1", 0.0), ("Sort: 2 1 =", "1 2", "2 2", 0.0)],
    )
    save_rows(
        url,
        "validation",
        steps,
        [("Sort: 2 1 =", "1 2", "1 2", 1.0), ("Sort: 2 1 =", "1 2", "1 2", 1.0)],
    )
    save_rows(
        url,
        "rollouts",
        steps,
        [(f"Sort: {at} 1 =", f"1 {at}", f"1 {at}", at / 4) for at in range(4)],
    )
    end_run(url, steps=steps)
    return str(url)
