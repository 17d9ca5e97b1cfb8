"""A real run is reported, watched and analyzed from what it left: nothing that the three need is
missing.
"""

import json

import pytest

from siirl_dask.cli import main


@pytest.mark.slow
def test_a_run_of_two_workers_is_reported_watched_and_analyzed(train, tmp_path, capsys):
    split = "cluster.placement={rollout: [0], reward: [0], policy: [1]}"
    url = str(train("told", "cluster.workers=2", split, "run.steps=4", "observe.trace=true").url)
    main(["report", url, "-o", str(tmp_path / "report.html")])
    assert "without the" not in capsys.readouterr().out, "every part of it can be told"
    page = (tmp_path / "report.html").read_text()
    for told in (
        "Slowest is node",
        "timeline of a step",
        "rollout-&gt;old_logprobs",
        "best: step 4",
    ):
        assert told in page, told

    with pytest.raises(SystemExit) as ended:
        main(["watch", url])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for told in ("complete  step 4 of 4", "slowest  node", "some samples of step 4"):
        assert told in said, told

    main(["plan", "--analyze", url, "--format", "json"])
    data = json.loads(capsys.readouterr().out)
    nodes, edges = (
        {one[key]: one for one in data[name]}
        for name, key in (("nodes", "name"), ("edges", "target"))
    )
    assert data["steps"] == [2, 3, 4]
    for name in ("rollout", "reward", "old_logprobs", "advantage", "update"):
        assert nodes[name]["seconds"]["measured"] > 0, name
        assert nodes[name]["memory"] > 50_000_000, name
    moved = edges["old_logprobs"]["bytes"]
    assert 0 < moved["measured"] <= edges["old_logprobs"]["most_bytes"]
    assert edges["old_logprobs"]["rows"]["measured"] == edges["old_logprobs"]["rows"]["estimated"]
    assert all(group["bytes"]["measured"] for group in data["memory"])
    assert {split["together"] for split in data["splits"]} == {True, False}
