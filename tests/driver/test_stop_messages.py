"""A message from another process ends a run; one that is sent to another cluster is refused."""

import re
from uuid import uuid4

import pytest
from distributed import Client, LocalCluster

from siirl_dask.driver.caller import AFTER_STEP, AT_ONCE, StopRequest, listen, send_to_listener
from siirl_dask.errors import ConfigError


def test_a_message_where_no_driver_listens_is_refused_and_waits_for_one():
    topic = f"siirl-stop-{uuid4().hex}"
    stop = StopRequest()
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=None) as cluster,
        Client(cluster, set_as_default=False) as client,
        Client(cluster.scheduler_address, set_as_default=False) as driver,
    ):
        at = re.escape(cluster.scheduler_address)
        with pytest.raises(ConfigError, match=f"no driver .* at {at}: give attach"):
            client.sync(send_to_listener, client, topic, AFTER_STEP)
        listen(driver, topic, stop)
        assert stop.after_step.is_set(), "it was sent while the driver waited for its workers"
        assert not stop.at_once.is_set()
        # at once: a driver that had not subscribed yet never got it
        client.sync(send_to_listener, client, topic, AT_ONCE)
        assert stop.at_once.wait(30)
