"""The doctor asks the servers that a run generates with what an engine would find out at its start."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from siirl_dask.config import (
    AgentConfig,
    Config,
    Dtype,
    Engine,
    ModelConfig,
    RolloutConfig,
    ServerConfig,
)
from siirl_dask.driver.doctor import DoctorState, check_servers
from siirl_dask.rollout.server_engine import examination
from siirl_dask.rollout.server_engine.vllm_server import EXTENSION, SAMPLER
from siirl_dask.rollout.vllm_engine.row_parameters import EXACT

MODEL = {
    "model": "/models/small",
    "logprobs_mode": EXACT,
    "dtype": "torch.float32",
    "max_model_len": 4096,
    "generation_config": "vllm",
    "logits_processors": [SAMPLER],
    "hf_overrides": {},
    "quantization": None,
    "model_class_overrides": {},
}
CACHE = {"cache_dtype": "auto", "mamba_cache_dtype": "auto", "mamba_ssm_cache_dtype": "auto"}
NOBODY = "http://127.0.0.1:9"


class Described(BaseHTTPRequestHandler):
    """A server that describes itself as the test says, as vLLM does at these addresses."""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.server.may_answer.wait(20)
        if self.path.startswith("/server_info"):
            self.send_response(self.server.status)
            self.end_headers()
            self.wfile.write(json.dumps(self.server.described).encode())
            return
        generates = self.server.generates and self.path == "/inference/v1/generate"
        self.send_response(405 if generates else 404)
        self.end_headers()

    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"results": [{"model_type": "qwen3"}]}')

    def log_message(self, *words):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Described)
    server.status = 200
    server.generates = True
    server.asked = []
    server.may_answer = threading.Event()
    server.may_answer.set()
    describe(server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.may_answer.set()
    server.shutdown()
    thread.join()
    server.server_close()


def describe(server, extension=EXTENSION, **model):
    server.described = {
        "vllm_config": {
            "model_config": MODEL | model,
            "device_config": {"device": "cpu"},
            "cache_config": CACHE,
            "parallel_config": {"worker_extension_cls": extension, "enable_eplb": False},
            "speculative_config": None,
            "kv_transfer_config": None,
            "watermark_config": None,
        }
    }


def url_of(server):
    return f"http://127.0.0.1:{server.server_port}"


def generating_with(*urls, **model):
    rollout = RolloutConfig(
        engine=Engine.server, server=ServerConfig(urls=list(urls), weights_folder="/weights")
    )
    return replace(Config(), rollout=rollout, model=ModelConfig(path="/models/absent", **model))


def test_a_server_that_fits_is_described(server):
    (finding,) = check_servers(generating_with(url_of(server)))
    assert finding.state is DoctorState.OK, finding
    assert finding.part == f"server {url_of(server)}"
    for said in ("/models/small", "float32", "4,096 tokens", EXACT):
        assert said in finding.text


def generates_nothing(server):
    server.generates = False


def is_no_developers(server):
    server.status = 404


def is_something_else(server):
    server.described = {"name": "another program"}


@pytest.mark.parametrize(
    ("change", "said", "cure"),
    [
        (lambda server: describe(server, logprobs_mode="raw_logprobs"), "--logprobs-mode is raw", "start it"),
        (lambda server: describe(server, generation_config="auto"), "--generation-config is auto", "start it"),
        (lambda server: describe(server, dtype="torch.float16"), "computes in float16, and", "--dtype float32"),
        (lambda server: describe(server, extension=""), "leaves some weights as they were", EXTENSION),
        (generates_nothing, "takes no requests at /inference/v1/generate", "rollout.server.urls"),
        (is_no_developers, "VLLM_SERVER_DEV_MODE=1", "rollout.server.urls"),
        (is_something_else, "does not describe itself as a server of vLLM", "rollout.server.urls"),
    ],
)  # fmt: skip
def test_what_would_end_an_engines_start_is_a_fault_with_its_cure(server, change, said, cure):
    change(server)
    (finding,) = check_servers(generating_with(url_of(server), dtype=Dtype.float32))
    assert finding.state is DoctorState.FAULT
    assert said in finding.text
    assert cure in finding.cure


def test_servers_that_do_not_answer_are_a_fault_each_and_are_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(examination, "_PATIENCE", 0.5)
    server.may_answer.clear()
    silent, absent = check_servers(generating_with(url_of(server), NOBODY))
    for finding, url in ((silent, url_of(server)), (absent, NOBODY)):
        assert finding.state is DoctorState.FAULT
        assert finding.part == f"server {url}"
        assert "does not answer" in finding.text


def test_servers_of_agents_are_asked_and_those_that_nobody_uses_are_not(server):
    used = generating_with(url_of(server))
    config = replace(Config(), agents={"a": AgentConfig(model=used.model, rollout=used.rollout)})
    (finding,) = check_servers(config)
    assert finding.part == f"server {url_of(server)}"
    server.asked.clear()
    assert [*check_servers(Config())] == []
    assert server.asked == []
