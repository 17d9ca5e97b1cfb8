"""The run's page shows prompts and responses to its own site alone."""

import asyncio
from contextlib import closing

import pytest
from bokeh.client import pull_session
from bokeh.util.token import generate_jwt_token, generate_session_id
from distributed import Client, LocalCluster
from hypothesis import given
from hypothesis import strategies as st
from tornado.httpclient import HTTPClient, HTTPClientError, HTTPRequest
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine
from tornado.websocket import websocket_connect

from siirl_dask.views.dashboard.origins import is_of_another_site
from siirl_dask.views.dashboard.plugin import PagePlugin
from siirl_dask.views.dashboard.store import LiveRun
from siirl_dask.views.dashboard.top_panel import TopPanel

HOSTS = st.from_regex(r"[a-z]{1,8}(\.[a-z]{2,5}){0,2}(:[1-9][0-9]{1,3})?", fullmatch=True)
ELSEWHERE = "http://evil.example"


class Connection:
    """A connection of no server."""

    context = None


def request(host, **headers):
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    line = RequestStartLine("GET", "/siirl", "HTTP/1.1")
    return HTTPServerRequest(
        start_line=line, headers=HTTPHeaders({"Host": host, **given}), connection=Connection()
    )


@given(
    HOSTS,
    HOSTS,
    st.sampled_from(["http", "https", "ws"]),
    st.sampled_from(["Origin", "Sec_Websocket_Origin"]),
)
def test_an_origin_counts_as_own_only_where_host_and_port_are_those_asked_for(
    host, other, scheme, header
):
    asked = request(host, **{header: f"{scheme}://{other}"})
    assert is_of_another_site(asked, []) == (host != other)
    assert not is_of_another_site(asked, [other])


@pytest.mark.parametrize(
    "origin", ["null", "", "file://", "http://", "http://[::1", "evil.example", "//"]
)
def test_an_origin_without_a_host_is_another_site(origin):
    assert is_of_another_site(request("localhost:8787", Origin=origin), [])


def test_a_script_or_a_frame_of_another_site_is_refused_and_a_link_to_the_page_is_not():
    cross = {"Sec_Fetch_Site": "cross-site"}
    assert is_of_another_site(
        request("localhost", **cross, Sec_Fetch_Mode="no-cors", Sec_Fetch_Dest="script"), []
    )
    assert is_of_another_site(
        request("localhost", **cross, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="iframe"), []
    )
    assert not is_of_another_site(
        request("localhost", **cross, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document"), []
    )
    assert not is_of_another_site(
        request("localhost", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors"), []
    )
    assert not is_of_another_site(request("localhost"), [])


@pytest.fixture(scope="module")
def address():
    options = {"dashboard_address": "127.0.0.1:0", "host": "127.0.0.1"}
    with LocalCluster(n_workers=0, **options) as cluster, Client(cluster) as client:
        client.register_plugin(PagePlugin())
        yield f"127.0.0.1:{cluster.scheduler.http_server.port}"


def status(url, **headers):
    with closing(HTTPClient()) as client:
        try:
            return client.fetch(HTTPRequest(url, headers=headers)).code
        except HTTPClientError as error:
            return error.code


@pytest.mark.parametrize(
    "page", ["siirl", "siirl/autoload.js?bokeh-autoload-element=1", "siirl/metadata"]
)
def test_pages_of_other_sites_get_403_and_its_own_get_the_page(address, page):
    url = f"http://{address}/{page}"
    assert status(url, Origin=ELSEWHERE) == 403
    assert status(url, Origin=f"http://{address}") == 200
    assert status(url) == 200
    assert status(f"http://{address}/status", Origin=ELSEWHERE) == 200, (
        "Dask's own pages are as they were"
    )


def test_the_websocket_opens_for_its_own_site_and_for_no_other(address):
    async def opens(origin):
        token = generate_jwt_token(generate_session_id())
        asked = HTTPRequest(f"ws://{address}/siirl/ws", headers={"Origin": origin})
        try:
            connection = await websocket_connect(asked, subprotocols=["bokeh", token])
        except HTTPClientError as error:
            return error.code
        message = await connection.read_message()
        connection.close()
        return "ACK" in message

    assert asyncio.run(opens(ELSEWHERE)) == 403
    assert asyncio.run(opens(f"http://{address}")) is True
    pull_session(url=f"http://{address}/siirl").close()  # a program names no site


def test_a_browser_cannot_choose_a_run_that_was_not_offered():
    panel = TopPanel(lambda: None)
    panel.offer_others(["mine", "yours"])
    panel._others.options = ["mine", "../../other/run"]  # a browser may change any property
    panel._others.value = ["mine", "../../other/run"]
    assert panel.others == ["mine"]


def test_the_name_of_a_folder_is_no_html_where_runs_are_offered():
    panel = TopPanel(lambda: None)
    panel.offer_others(["<img src=x onerror=alert(1)>"])
    ((value, label),) = panel._others.options
    assert value == "<img src=x onerror=alert(1)>"
    assert "<" not in label


def test_a_browser_is_not_told_the_secrets_of_a_run_s_url_and_chooses_it_all_the_same():
    panel = TopPanel(lambda: None)
    runs = [LiveRun("https://user:S3CR3T@host/one", "one"), LiveRun("https://user:S3CR3T@host/two")]
    panel.offer(runs)
    assert "S3CR3T" not in str(panel._run.options) + panel._run.value
    assert panel.run == runs[1].url
    panel._run.value = panel._run.options[1][0]
    assert panel.run == runs[0].url
