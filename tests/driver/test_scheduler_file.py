"""``cluster.scheduler_file`` is waited for as long as the cluster may take to start, and refused
by name.
"""

import io
import json
import threading

import pytest

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.driver.clusters.cluster import connect
from siirl_dask.errors import ConfigError
from siirl_dask.observe import Progress
from siirl_dask.observe.console import PipeConsole


def connected(file, shown=None, start_timeout=0.5):
    cluster = ClusterConfig(workers=1, scheduler_file=str(file), start_timeout=start_timeout)
    progress = Progress(1, PipeConsole(file=shown)) if shown else Progress(1, enabled=False)
    return connect(Config(cluster=cluster), progress)


def test_a_file_that_never_comes_is_waited_for_with_a_word_and_then_refused(tmp_path):
    file, shown = tmp_path / "scheduler.json", io.StringIO()
    with pytest.raises(
        ConfigError, match=rf"cluster\.scheduler_file='{file}' has not come within .*=0\.5 s"
    ):
        connected(file, shown).__enter__()
    assert f"waiting for cluster.scheduler_file='{file}', up to 0.5 s" in shown.getvalue().replace(
        "\n", ""
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"address": 7}'])
def test_a_file_with_something_else_in_it_is_refused(tmp_path, text):
    file = tmp_path / "scheduler.json"
    file.write_text(text)
    with pytest.raises(
        ConfigError, match=rf"cluster\.scheduler_file='{file}' is none that .* expected JSON"
    ):
        connected(file).__enter__()


def test_a_file_whose_scheduler_is_gone_is_refused_with_the_address_in_it(tmp_path):
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": "tcp://127.0.0.1:9"}))
    with pytest.raises(
        ConfigError, match=rf"no Dask scheduler answers at 'tcp://127\.0\.0\.1:9', .*'{file}' names"
    ):
        connected(file).__enter__()


def test_a_file_that_comes_late_is_taken(tmp_path, cluster_address):
    file = tmp_path / "scheduler.json"
    late = threading.Timer(0.3, file.write_text, [json.dumps({"address": cluster_address})])
    late.start()
    with connected(file, start_timeout=60.0) as client:
        assert client.scheduler.address == cluster_address
    late.join()
