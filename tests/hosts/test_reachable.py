"""Before anything starts, each worker looks for what it will read and write: what a host lacks
is said by its name.
"""

import pytest

pytestmark = pytest.mark.slow


def test_a_model_that_a_host_lacks_and_a_run_folder_that_is_not_shared_are_refused_by_host(
    cluster_of_three, digits_on, digits_task, tmp_path
):
    own = tmp_path / "own"
    own.mkdir()
    lab, cluster = cluster_of_three(private=[own])
    lab.hosts[0].run("cp", "-r", digits_task.model, own / "model")
    lab.hosts[1].run("cp", "-r", digits_task.model, own / "model")
    run = digits_on(cluster, lab.hosts[0], f"model.path={own / 'model'}")
    out, _ = run.end()
    assert run.process.returncode == 2, out
    assert (
        f"for worker '2' on host 'host2' the model of role 'policy' '{own / 'model'}' is not there"
        in out
    )
    assert "host1" not in out

    run = digits_on(cluster, lab.hosts[0], f"run.url={own / 'run'}", name="second")
    out, _ = run.end()
    assert run.process.returncode == 2, out
    for host in ("host1", "host2"):
        assert f"on host '{host}' run.url '{own / 'run'}' is another folder there" in out
