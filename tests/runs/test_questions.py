"""The ready questions: each gives what a plain loop over the rows gives, and reads no column
that it does not need.
"""

import re
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from siirl_storage import commit_parts, open_fs, stage_part

from siirl_dask.cli import main
from siirl_dask.errors import DataError
from siirl_dask.runs.samples import questions
from siirl_dask.runs.samples.mismatch import RATIO_BINS, mismatch
from siirl_dask.runs.samples.rollouts import open_rollouts

TAGS = "html head meta title style body h1 h2 h3 h4 p section article pre table tr th td span"
NASTY = "\x1b[31m<script>alert(1)</script> & \x07</pre>"
LISTS = {
    name: pa.large_list(kind)
    for name, kind in {"response_ids": pa.int32(), "prompt_ids": pa.int32()}.items()
}
LOGPROBS = {name: pa.large_list(pa.float32()) for name in ("rollout_logprobs", "old_logprobs")}
KINDS = {**LISTS, **LOGPROBS, "reward": pa.float32(), "data_part": pa.int32()}


def row(step, number, reward, length, *, ratio=1.0, source="a", text="so"):
    return {
        "row_id": number,
        "group_id": number // 2,
        "tokens": length + 3,
        "prompt_ids": [1, 2, 3],
        "prompt_text": f"question {number // 2} {text}",
        "answer": number // 2,
        "meta": {"source": source},
        "data_part": 0,
        "data_row": number // 2,
        "response_ids": [7] * length,
        "response": f"step {step}, row {number} {text}",
        "rollout_logprobs": [-1.0] * length,
        "old_logprobs": [-1.0 + float(np.log(ratio))] * length,
        "finish_reason": "length" if length == 9 else "stop",
        "reward": reward,
        "worker": "0",
    }


def save(url, rows_of_steps, *, parts=2, attempt=3, table="rollouts"):
    for step, rows in rows_of_steps.items():
        folder, written = f"{url}/{table}/step={step:06d}", []
        for part in range(parts):
            own = rows[part::parts] or rows[:0]
            columns = {
                name: pa.array([one[name] for one in own], KINDS.get(name)) for name in rows[0]
            }
            written.append(stage_part(folder, attempt, part, pa.table(columns)))
        commit_parts(folder, attempt, written)
    return str(url)


@pytest.fixture
def run(tmp_path):
    """Two steps of eight samples; the first prompt becomes solved, and its group has equal
    rewards then.
    """
    steps = {
        1: [
            row(1, at, 0.0 if at < 4 else at / 8, at + 2, source="ab"[at % 2], text=NASTY)
            for at in range(8)
        ],
        2: [
            row(2, at, 1.0 if at < 4 else at / 8, at + 2, source="ab"[at % 2], ratio=1.5)
            for at in range(8)
        ],
    }
    return save(tmp_path / "run", steps)


samples = st.tuples(
    st.sampled_from([0.0, 0.25, 1.0, None]),
    st.integers(0, 9),
    st.sampled_from("abc"),
    st.sampled_from([0.4, 1.0, 1.1]),
)


@settings(max_examples=15)
@given(
    drawn=st.lists(st.lists(samples, min_size=2, max_size=9), min_size=1, max_size=3),
    parts=st.integers(1, 3),
)
def test_every_question_gives_what_a_loop_over_the_rows_gives(tmp_path_factory, drawn, parts):
    steps = {
        step: [
            row(step, at, reward, length, source=source, ratio=ratio)
            for at, (reward, length, source, ratio) in enumerate(rows)
        ]
        for step, rows in enumerate(drawn, start=1)
    }
    url = save(tmp_path_factory.mktemp("run"), steps, parts=parts)
    rows = [{"step": step, **one} for step, own in steps.items() for one in own]
    scored = [one for one in rows if one["reward"] is not None]
    with open_rollouts(url) as rollouts:
        check_by(questions.by(rollouts, "meta.source"), rows)
        check_groups(questions.zero_variance(rollouts), scored)
        check_lengths(questions.lengths(rollouts), rows)
        check_mismatch(mismatch(rollouts), rows)
        for question, sign in ((questions.worst, 1), (questions.best, -1)):
            if scored:
                expected = sorted(
                    scored, key=lambda one: (sign * one["reward"], -one["step"], one["row_id"])
                )[:4]
                found = question(rollouts, 4).to_pylist()
                for name in ("step", "row_id", "reward", "response"):
                    assert [one[name] for one in found] == [one[name] for one in expected], name
            else:
                with pytest.raises(
                    DataError, match="no sample of the table 'rollouts' has a reward"
                ):
                    question(rollouts)


def check_by(found, rows):
    for one in found.to_pylist():
        own = [row for row in rows if row["meta"]["source"] == one["meta.source"]]
        rewards = [row["reward"] for row in own if row["reward"] is not None]
        assert one["samples"] == len(own)
        assert one["reward"] == (pytest.approx(fmean(rewards)) if rewards else None)
        assert one["response_tokens"] == pytest.approx(
            fmean(len(row["response_ids"]) for row in own)
        )
    assert sum(found["samples"].to_pylist()) == len(rows)


def check_groups(found, scored):
    groups = defaultdict(lambda: defaultdict(list))
    for one in scored:
        groups[one["step"]][one["group_id"]].append(one["reward"])
    expected = {}
    for step, own in groups.items():
        whole = [rewards for rewards in own.values() if len(rewards) > 1]
        if whole:
            expected[step] = (len(whole), sum(len(set(rewards)) == 1 for rewards in whole))
    assert {one["step"]: (one["groups"], one["equal"]) for one in found.to_pylist()} == expected


def check_lengths(found, rows):
    bins = found.to_pylist()
    for one in bins:
        own = [row for row in rows if one["from"] <= len(row["response_ids"]) <= one["to"]]
        assert one["samples"] == len(own)
        if own:
            assert one["truncated"] == fmean(row["finish_reason"] == "length" for row in own)
    assert sum(one["samples"] for one in bins) == len(rows)


def check_mismatch(found, rows):
    for one in found.to_pylist():
        own = [row for row in rows if row["step"] == one["step"]]
        logs = [
            new - old
            for row in own
            for new, old in zip(row["old_logprobs"], row["rollout_logprobs"], strict=True)
        ]
        assert one["tokens"] == len(logs)
        assert one["mean"] == pytest.approx(fmean(map(abs, logs)), abs=1e-6)
        assert one["largest"] == pytest.approx(max(map(abs, logs)), abs=1e-6)
        shares = {0.4: RATIO_BINS[0], 1.0: RATIO_BINS[3], 1.1: RATIO_BINS[4]}
        for ratio, name in shares.items():
            assert one[name] == pytest.approx(
                fmean(abs(log - np.log(ratio)) < 1e-6 for log in logs)
            )


@pytest.mark.parametrize("missing", [("old_logprobs",), ("rollout_logprobs",), tuple(LOGPROBS)])
def test_a_row_that_lacks_log_probs_of_one_side_moves_no_others(tmp_path, missing):
    """Rows have log-probs of one side alone where a node in between left them out."""
    rows = [row(1, at, 1.0, at + 1, ratio=ratio) for at, ratio in enumerate([0.4, 1.0, 1.1, 1.0])]
    whole = rows[0], rows[2], rows[3]
    rows[1] = rows[1] | dict.fromkeys(missing)
    with open_rollouts(save(tmp_path / "run", {1: rows}, parts=1)) as rollouts:
        check_mismatch(mismatch(rollouts), [{"step": 1, **one} for one in whole])


def test_the_same_prompts_then_and_now_with_the_largest_change_first(run):
    with open_rollouts(run) as rollouts:
        found = questions.diff(rollouts, 1, 2).to_pylist()
    assert [(one["then"], one["now"], one["change"]) for one in found[:3]] == [
        (0, 1, 1),
        (0, 1, 1),
        (0.5625, 0.5625, 0),
    ]
    assert found[0]["then_response"].startswith("step 1, row 0")
    assert found[0]["now_response"].startswith("step 2, row 0")


def test_rows_without_lineage_are_compared_by_their_prompts_text(tmp_path):
    plain = [
        {"row_id": at, "prompt": f"p{at}", "response": "r", "reward": float(at)} for at in range(3)
    ]
    url = save(tmp_path, {1: plain[:2], 2: plain[1:], 3: plain[:1]})
    with open_rollouts(url) as rollouts:
        assert questions.diff(rollouts, 1, 2)["prompt"].to_pylist() == ["p1"]
        with pytest.raises(DataError, match=r"steps 2 and 3 .* no prompt in common"):
            questions.diff(rollouts, 2, 3)
        with pytest.raises(DataError, match="has no step 9: it has 3, 1 to 3"):
            questions.diff(rollouts, 1, 9)


def test_only_the_mismatch_reads_columns_with_a_value_per_token(run):
    """The pages of these columns are overwritten: whoever reads them fails."""
    for path in (part for step in (1, 2) for part in open_parts(run, step)):
        data, metadata = bytearray(path.read_bytes()), pq.ParquetFile(path).metadata
        for column in (metadata.row_group(0).column(at) for at in range(metadata.num_columns)):
            if column.path_in_schema.split(".")[0] in (*LOGPROBS, "response_ids"):
                start = column.dictionary_page_offset or column.data_page_offset
                data[start : start + column.total_compressed_size] = (
                    b"\xff" * column.total_compressed_size
                )
        path.write_bytes(data)
    with open_rollouts(run) as rollouts:
        for ask in (
            questions.overview,
            questions.worst,
            questions.best,
            questions.lengths,
            questions.zero_variance,
        ):
            assert ask(rollouts).num_rows
        assert questions.by(rollouts, "worker").num_rows == 1
        assert questions.diff(rollouts, 1, 2).num_rows == 4
        with pytest.raises(DataError, match=r"part-0003-0000\d\.parquet cannot be read"):
            mismatch(rollouts)


def open_parts(run, step):
    return sorted(Path(run, "rollouts", f"step={step:06d}").glob("*.parquet"))


def test_the_start_that_wrote_a_row_is_told_by_its_part(run):
    save(run, {3: [row(3, at, 1.0, 4) for at in range(2)]}, attempt=12)
    with open_rollouts(run) as rollouts:
        found = rollouts.table(
            "SELECT step, any_value(attempt) AS attempt FROM rollouts GROUP BY 1 ORDER BY 1"
        )
    assert found.to_pydict() == {"step": [1, 2, 3], "attempt": [3, 3, 12]}


@pytest.mark.parametrize("steps", [(7, 999_999), (999_999, 1_000_000)])
def test_a_row_has_the_step_of_its_folder_whatever_the_lengths_of_names(tmp_path, steps):
    url = str(tmp_path / "step=9" / "run")
    for attempt, step in zip((1, 12_345), steps, strict=True):
        save(url, {step: [row(step, 0, 1.0, 4)]}, attempt=attempt)
    with open_rollouts(url) as rollouts:
        found = rollouts.table("SELECT step, attempt FROM rollouts ORDER BY 1").to_pydict()
        assert found == {"step": [*steps], "attempt": [1, 12_345]}
        assert rollouts.table(f"SELECT step FROM rollouts WHERE step = {steps[1]}").num_rows == 1


def test_a_step_that_is_not_asked_for_is_not_read(run):
    for path in open_parts(run, 1):
        path.write_bytes(b"no parquet".ljust(path.stat().st_size))
    with open_rollouts(run, steps=range(2, 9)) as rollouts:
        assert questions.overview(rollouts)["step"].to_pylist() == [2]
    with (
        pytest.raises(
            DataError, match="has saved no step from 5 to 8 of 'rollouts': it has 2 steps, 1 to 2"
        ),
        open_rollouts(run, steps=range(5, 9)),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--by", "wroker"], "no column 'wroker'.*did you mean 'worker'"),
        (["--by", "meta.sorce"], "no column 'meta.sorce'.*did you mean 'source'"),
        (["--by", "response_ids"], "the column 'response_ids' holds list"),
        (["--step", "7"], "has saved no step 7 of 'rollouts': it has 2 steps, 1 to 2"),
        (["--wrost"], "unrecognized arguments: --wrost; did you mean '--worst'"),
        (["--steps", "5:2"], "the first step comes after the last"),
        (["--steps", "2-5"], "expected A:B"),
        (["--steps", ""], "expected A:B"),
        (["--steps", "7:"], "has saved no step from 7 on of 'rollouts'"),
        (["--worst", "0"], "0 samples: expected at least 1"),
        (["--turns"], "has no column 'turns': no node of the run's DAG wrote it"),
        (["--worst", "--lengths", "SELECT 1"], "give SQL or ready questions, not both"),
        (["--table", "validation"], "holds no table 'validation'"),
        (["--table", "../x"], "is no table of a run"),
        (["--lengths", "--html", "nope://page"], "--html='nope://page' cannot be written"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(run, options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["rollouts", run, *options])
    assert ended.value.code == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_a_terminal_is_not_given_what_a_model_says_to_it(run, capsys):
    main(["rollouts", run, "--worst", "--by", "prompt_text", "--diff", "1", "2"])
    shown = capsys.readouterr().out
    assert "alert(1)" in shown
    assert not {c for c in shown if not c.isprintable()} - {"\n"}
    main(["rollouts", run, "SELECT response FROM rollouts"])
    assert "\x1b" not in capsys.readouterr().out


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def test_a_page_is_one_file_in_which_nothing_that_a_model_says_is_markup(run, tmp_path, capsys):
    file = tmp_path / "page.html"
    main(["rollouts", run, "--html", str(file)])
    unlearned = [{name: value for name, value in row(0, 0, 1.0, 3).items() if name not in LOGPROBS}]
    save(run, {0: unlearned}, parts=1, table="validation")
    main(["rollouts", run, "--table", "validation", "--html", str(file)])
    main(
        [
            "rollouts",
            run,
            "--html",
            str(file),
            "--diff",
            "1",
            "2",
            "--by",
            "response",
            "--worst",
            "9",
        ]
    )
    parser = Tags()
    parser.feed(file.read_text())
    assert "<script>alert(1)</script>" in parser.text
    assert parser.tags <= {*TAGS.split()}
    assert "src=" not in file.read_text().replace("src 'none'", "")


def test_a_store_gives_the_answers_that_local_files_give(run, s3, tmp_path, capsys):
    fs, path = open_fs(f"{s3}/asked")
    fs.put(f"{run}/rollouts", f"{path}/rollouts", recursive=True)
    asked = [
        "--worst",
        "2",
        "--by",
        "meta.source",
        "--zero-variance",
        "--lengths",
        "--mismatch",
        "--diff",
        "1",
        "2",
    ]
    answers = []
    for url in (run, f"{s3}/asked"):
        main(["rollouts", url, *asked])
        main(["rollouts", url, "SELECT step, row_id, reward, attempt FROM rollouts ORDER BY 1, 2"])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    main(["rollouts", f"{s3}/asked", "--best", "--html", f"{s3}/asked/page.html"])
    assert b"<!doctype html>" in fs.cat_file(f"{path}/page.html")


def test_a_question_does_not_wait_for_torch_and_dask(run):
    code = (
        "import sys; from siirl_dask.cli import main; main(sys.argv[1:]); print({'torch', 'dask'} "
        "& {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "rollouts", run, "--lengths"], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_the_documented_example_runs(run):
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    (example,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "open_rollouts" in code
    )
    assert all(name in example for name in ("zero_variance", "mismatch", "worst"))
    exec(example.replace('"runs/mine"', repr(run)), {})
