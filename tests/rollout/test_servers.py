"""Parts of the engine of servers that need no vLLM: what a configuration may say, who gets a request,
what a server may answer, files of weights, and a server that comes and goes.
"""

import asyncio
import json
import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from types import SimpleNamespace
from uuid import uuid4

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from siirl_dask.config import (
    Config,
    Dtype,
    Engine,
    ModelConfig,
    RolloutConfig,
    Sampler,
    ServerConfig,
    VllmConfig,
)
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.http_client import EndingClient
from siirl_dask.rollout import (
    FinishReason,
    GenerationRequest,
    LocalQueue,
    Sampling,
    check_engine,
    servers_go_on,
)
from siirl_dask.rollout.concurrent_requests import serve_concurrently
from siirl_dask.rollout.server_engine import connection, serve
from siirl_dask.rollout.server_engine.answers import read_vllm_answer
from siirl_dask.rollout.server_engine.balance import choose_server
from siirl_dask.rollout.server_engine.connection import (
    OutOfReachError,
    SilentError,
    UnansweredError,
)
from siirl_dask.rollout.server_engine.engine import ServerEngine
from siirl_dask.rollout.server_engine.examination import examine_servers
from siirl_dask.rollout.server_engine.serve import arguments
from siirl_dask.rollout.server_engine.vllm_server import EXTENSION, SAMPLER, VllmServer
from siirl_dask.rollout.server_engine.weight_folder import WeightFolder
from siirl_dask.rollout.vllm_engine.row_parameters import EXACT, RAW

URL = "http://127.0.0.1:8000"
SERVER = ServerConfig(urls=[URL], weights_folder="/weights")
REQUEST = GenerationRequest([1, 2], 3, Sampling(max_tokens=4))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("10.0.0.7:8000", "expected a server's address"),
        ("ftp://10.0.0.7", "expected a server's address"),
        ("http://", "expected a server's address"),
        ("http://host:0", "expected a server's address"),
        ("http://a b:8000", "expected a server's address"),
        ("http://host:8000\n", "expected a server's address"),
        ("http://host..name:8000", "label empty or too long"),
        ("http://host:99999", "out of range"),
        ("http://me:secret@host:8000", "a user's name or a password"),
        ("http://host:8000/v1", "leave out the path"),
        ("http://host:8000?key=1", "leave out the path"),
    ],
)
def test_an_url_that_is_no_servers_is_refused_and_no_password_is_said(url, said):
    with pytest.raises(ConfigError, match=said) as refused:
        ServerConfig(urls=[url])
    assert "secret" not in str(refused.value)


def test_options_of_servers_are_refused_where_nothing_reads_them_or_something_is_missing():
    for again in (URL, f"{URL}/", URL.upper().replace("HTTP", "http")):
        with pytest.raises(ConfigError, match="there 2 times"):
            ServerConfig(urls=[URL, again])
    with pytest.raises(ConfigError, match="there 2 times"):
        ServerConfig(urls=["http://Host", "http://host:80"])
    with pytest.raises(ConfigError, match="expected an absolute path"):
        ServerConfig(weights_folder="weights")
    with pytest.raises(ConfigError, match=r"servers alone read this, and rollout\.engine is auto"):
        RolloutConfig(server=SERVER)
    with pytest.raises(ConfigError, match=r"rollout\.server\.urls is empty"):
        RolloutConfig(engine=Engine.server)
    with pytest.raises(ConfigError, match="weights_folder is not set"):
        RolloutConfig(engine=Engine.server, server=ServerConfig(urls=[URL]))
    with pytest.raises(ConfigError, match="the server's own command line"):
        RolloutConfig(engine=Engine.server, server=SERVER, vllm=VllmConfig(max_num_seqs=3))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"router_replay": True}, "router_replay"),
        ({"draft_tokens": 2}, "drafts no tokens"),
        ({"tensor_parallel_size": 2}, "is on one worker"),
        ({"sampler": Sampler.vllm, "top_k": 5, "temperature": 0.7}, "rollout.sampler=vllm"),
    ],
)
def test_what_servers_cannot_do_is_refused_before_anything_starts(settings, said, digits_task):
    model = ModelConfig(path=str(digits_task.model))
    rollout = RolloutConfig(engine=Engine.server, server=SERVER, **settings)
    with pytest.raises(ConfigError, match=said):
        check_engine({"model": model, "rollout": rollout}, ["0"], Config(model=model))


def test_workers_have_servers_of_their_own_and_no_memory_for_the_model(digits_task):
    model = ModelConfig(path=str(digits_task.model))
    rollout = RolloutConfig(engine=Engine.server, server=SERVER)
    cost = check_engine({"model": model, "rollout": rollout}, ["0"], Config(model=model))
    assert cost.memory == 0
    assert URL in " ".join(cost.notes)
    with pytest.raises(ConfigError, match="1 server, and 2 workers generate"):
        check_engine({"model": model, "rollout": rollout}, ["0", "1"], Config(model=model))


def test_a_server_without_vllm_ends_with_the_extra_to_install(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["serve", "model"])
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="install the extra gpu or cpu"):
        serve.main()


def test_the_servers_command_has_what_is_needed_and_a_users_options_in_its_place():
    words = arguments("model", ["--port", "1", "--host=0.0.0.0", "--logprobs-mode", "raw_logprobs"])
    assert words[:2] == ["--model", "model"]
    assert words[-5:] == ["--port", "1", "--host=0.0.0.0", "--logprobs-mode", "raw_logprobs"]
    assert words.count("--logprobs-mode") == 1
    assert "--host" not in words
    assert "--worker-extension-cls" in words
    for option in ("--load-format", "--config-format"):
        assert words[words.index(option) + 1] == "hf", "those of transformers"


@given(
    st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), max_size=60),
    st.integers(1, 5),
)
def test_no_server_has_much_more_to_do_than_the_mean_and_one_prompt_goes_to_one(prompts, number):
    under_way = [0] * number
    for prompt in prompts:
        chosen = choose_server(prompt, under_way)
        assert 0 <= chosen < number
        under_way[chosen] += 1
        assert max(under_way) <= max(1.25 * (sum(under_way)) / number, 1) + 1
    for prompt in prompts:
        assert len({choose_server(prompt, [0] * number) for _ in range(3)}) == 1


def answer_of(tokens, logits, reason="length", label="a-1", **more):
    content = [
        {"token_id": token, "logprob": logit} for token, logit in zip(tokens, logits, strict=True)
    ]
    choice = {
        "token_ids": tokens,
        "logprobs": {"content": content},
        "finish_reason": reason,
        "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}],
    }
    return {"choices": [{**choice, **more}]}


def test_an_answer_is_read_as_a_response_with_the_label_of_its_weights():
    read = read_vllm_answer(answer_of([5, 6], [0.5, 0.25], "stop"), REQUEST, {6}, EXACT, URL)
    assert read.generation.token_ids == [5, 6]
    assert read.generation.logprobs == [-0.5, -0.25]
    assert read.generation.finish_reason is FinishReason.STOP
    assert read.labels == {"a-1"}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "has not the form"),
        ({"choices": []}, "expected one choice"),
        (answer_of([5], [0.5], "error"), "ended by something else"),
        (answer_of([5], [0.5], weight_versions=None), "has not the form"),
        (answer_of([5], [0.5], token_ids=[6]), "other tokens than it sampled"),
        (answer_of([-5], [0.5]), "expected a token"),
        (answer_of([True], [0.5]), "expected a token"),
        (answer_of([5], ["0.5"]), "expected a number"),
        (answer_of([5], [True]), "expected a number"),
        (answer_of([], []), "other tokens than it sampled"),
        (answer_of([1] * 5, [0.5] * 5), "at most 4 were asked for"),
        (answer_of([5], [float("nan")]), "not finite"),
        (answer_of([5], [-9999.0]), "not finite"),
        (answer_of(["x" * 10**6], [0.5]), "expected a token"),
        (answer_of([5], [0.5], "x" * 10**6), "ended by something else"),
        (answer_of([5], [-0.5]), "as a log-probability"),
        (answer_of([2**31], [0.5]), "expected a token"),
        (answer_of([5], [10**400]), "has not the form"),
        (answer_of([5] * 3, [0.5] * 3), "cut a response at 3 tokens, and 4 were asked for"),
        (answer_of([6, 5], [0.5] * 2, "stop"), "with the token 5, which ends none"),
        (answer_of([6] * 4, [0.5] * 4), "went on after a token that ends a response"),
    ],
)
def test_an_answer_of_another_form_is_an_error_that_names_the_server(found, said):
    with pytest.raises(RunError, match=said) as refused:
        read_vllm_answer(found, REQUEST, {6}, EXACT, URL)
    assert URL in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_what_vllm_writes_for_a_log_prob_that_is_not_finite_is_none():
    """JSON has no such number: vLLM's server writes -9999, in every mode of log-probs."""
    with pytest.raises(RunError, match="logits that are not finite"):
        read_vllm_answer(answer_of([5] * 4, [-0.5, -9999.0, -0.5, -0.5]), REQUEST, {6}, RAW, URL)


def test_weights_are_written_in_buckets_and_what_dead_engines_left_is_removed(tmp_path):
    weights = {f"layer.{index}": torch.randn(10, 10) for index in range(5)}
    first = WeightFolder(str(tmp_path), bucket=900, engine="1" * 32)
    folder = first.write(weights.items(), 1)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 3
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    newer = first.write(weights.items(), 2)
    first.keep_only(newer)
    second = WeightFolder(str(tmp_path), bucket=900, engine="2" * 32)
    assert newer.is_dir(), "another engine's folder stays while that one lives"
    first._lock.release()  # as the death of its process does
    third = WeightFolder(str(tmp_path), bucket=900, engine="3" * 32)
    assert not newer.exists()
    second.close()
    third.close()
    assert not list(tmp_path.iterdir())


def test_engines_that_start_together_leave_each_others_folders_alone(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            made = [threads.submit(WeightFolder, str(tmp_path), 900, uuid4().hex) for _ in range(8)]
            folders = [each.result() for each in made]
            assert len(list(tmp_path.glob("siirl-weights-*"))) == 8
            for folder in folders:
                folder.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_an_error_of_the_configuration(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="weights_folder"):
        WeightFolder(str(tmp_path / "file"), bucket=1, engine="1" * 32)


def test_the_weights_of_an_engine_on_another_host_are_not_taken_for_a_dead_ones(tmp_path):
    """Its lock is free for whoever does not see it, as on a mount whose locks are local."""
    other = "a" * 32
    away = tmp_path / f"siirl-weights-{'0' * 16}-{other}"
    away.mkdir()
    folder = WeightFolder(str(tmp_path), bucket=900, engine="1" * 32)
    assert away.is_dir()
    for label in ("default", "", "*", "../" + other, other[:-1]):
        folder.remove_of(label)
    assert away.is_dir()
    folder.remove_of(other)
    folder.close()
    assert not list(tmp_path.iterdir())


class Answers(BaseHTTPRequestHandler):
    """Answers with what the test has put into ``server.answers``, in order, and then with the last
    of them; or with what that returns for a path and a body. Status None is no answer: the body is a
    queue, which hears of the end of the connection.
    """

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.answer(json.loads(self.rfile.read(length)))

    def answer(self, body):
        self.server.asked.append((self.path, body))
        waiting = self.server.answers
        if callable(waiting):
            status, body = waiting(self.path, body)
        else:
            status, body = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        if status is None:  # it generates for as long as somebody waits
            self.connection.settimeout(20)
            self.server.waiting.append(self.connection)
            body.put(self.connection.recv(1))
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *words):
        pass


@contextmanager
def http_server(port=0):
    server = ThreadingHTTPServer(("127.0.0.1", port), Answers)
    server.asked = []
    server.waiting = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def http():
    with http_server() as server:
        yield server


def asked(http, *answers, patience=5.0):
    """Send one request to a server that answers so."""
    http.answers = list(answers)
    rollout = RolloutConfig(engine=Engine.server, server=replace(SERVER, patience=patience))

    async def ask():
        server = VllmServer(f"http://127.0.0.1:{http.server_port}", rollout, 2, lambda: None)
        try:
            return await server.ask("POST", "/inference/v1/generate", {"token_ids": [1]})
        finally:
            server.close()

    return asyncio.run(ask())


def test_a_server_that_starts_again_is_asked_again_with_the_same_words(http):
    answers = [(503, b"starting"), (502, b""), (429, b"too many requests")]
    assert asked(http, *answers, (200, {"choices": []})) == {"choices": []}
    assert http.asked == [("/inference/v1/generate", {"token_ids": [1]})] * 4


@pytest.mark.parametrize(
    ("answers", "said", "times"),
    [
        ([(400, b"no room")], "400 no room", 1),
        ([(404, b"")], "--enable-scale-out", 1),
        ([(500, b"broken")], "500 broken", 3),
        ([(200, b"{")], "is no JSON", 1),
        ([(200, b"[" * 100_000)], "is no JSON", 1),
    ],
)
def test_a_server_that_refuses_or_fails_ends_the_run_with_its_own_words(http, answers, said, times):
    with pytest.raises(RunError, match=said):
        asked(http, *answers)
    assert len(http.asked) == times


def test_a_server_that_stays_out_of_reach_is_named_with_the_key_for_its_patience(http):
    with pytest.raises(RunError, match=r"rollout\.server\.patience.*503 gone"):
        asked(http, (503, b"gone"), patience=0.2)


class VllmAnswers:
    """A server of vLLM's answers; ``labels`` are those of the responses, in order, and then of its
    weights.
    """

    def __init__(
        self, *labels, processors=(SAMPLER,), mode=EXACT, settings=None, device="cuda", **more
    ):
        self.labels = [*labels]
        self.processors = processors
        self.mode = mode
        self.settings = settings or {}
        """Values of its description that differ, by their place there."""
        self.device = device
        self.more = {"hf_overrides": {}} | more
        self.loaded = "default"
        self.paused = False
        self.config = None
        """Config of its model, which it says with the extension; None: it has none."""
        self.refusals = []
        """Answers to the next requests to load weights, in place of 200."""
        self.forgets = [True]
        """Whether it forgets keys and values of the weights before: each time, and then the last."""
        self.loads = 0

    def __call__(self, path, body):
        match path.partition("?")[0]:
            case "/server_info":
                model = {"model": "m", "logprobs_mode": self.mode, "dtype": "float32"}
                model |= {"max_model_len": 64, "generation_config": "vllm"}
                model["logits_processors"] = self.processors
                model |= {"quantization": None, "model_class_overrides": {}}
                model |= self.more
                config = {"model_config": model, "device_config": {"device": self.device}}
                config["cache_config"] = dict.fromkeys(
                    ("cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"), "auto"
                )
                extension = None if self.config is None else EXTENSION
                config["parallel_config"] = {
                    "worker_extension_cls": extension,
                    "enable_eplb": False,
                }
                config |= dict.fromkeys(
                    ("speculative_config", "kv_transfer_config", "watermark_config")
                )
                described = {"vllm_config": config, "vllm_env": {}}
                for path, value in self.settings.items():
                    *parts, name = path.split(".")
                    part = described
                    for each in parts:
                        part = part[each]
                    part[name] = value
                return 200, described
            case "/pause":
                self.paused = True
            case "/resume":
                self.paused = False
            case "/is_paused":
                return 200, {"is_paused": self.paused}
            case "/collective_rpc" if body["method"] == "siirl_model_config":
                return 200, {"results": [self.config]}
            case "/collective_rpc":
                self.loads += 1
                return self.refusals.pop(0) if self.refusals else (200, b"")
            case "/reset_prefix_cache":
                forgot = self.forgets.pop(0) if len(self.forgets) > 1 else self.forgets[0]
                return 200, {"success": forgot}
            case "/update_weight_version":
                self.loaded = body["new_version"]
            case "/weight_info":
                return 200, {"weight_version": self.loaded}
            case "/inference/v1/generate" if body is None:
                return 405, b""
            case "/inference/v1/generate":
                label = self.labels.pop(0) if self.labels else self.loaded
                return 200, answer_of([5] * 4, [0.5] * 4, label=label)
        return 200, b""


def examined(http, model):
    """Ask a server what it is, and hold that against a model."""

    async def examine():
        rollout = RolloutConfig(engine=Engine.server, server=SERVER)
        server = VllmServer(f"http://127.0.0.1:{http.server_port}", rollout, 1, lambda: None)
        try:
            await server.examine()
            server.check(model)
        finally:
            server.close()

    asyncio.run(examine())


@contextmanager
def engine_over(http, folder, weights, answers, *others, patience=600.0, **settings):
    """An engine over a server that answers so; with ``others`` over several, and a list of answers."""
    urls = []
    for server in [http, *others]:
        server.answers = answers.pop(0) if isinstance(answers, list) else answers
        urls.append(f"http://127.0.0.1:{server.server_port}")
    config = ServerConfig(urls=urls, weights_folder=str(weights), patience=patience)
    rollout = RolloutConfig(engine=Engine.server, server=config, **settings)
    model = ModelConfig(path=str(folder), dtype=Dtype.float32)
    engine = ServerEngine(model, rollout, Device("w0"), Rank())
    try:
        yield engine
    finally:
        engine.close()


def served(http, folder, weights, answers):
    """A response of an engine over a server that answers so."""
    with engine_over(http, folder, weights, answers) as engine:
        queue = LocalQueue([REQUEST])
        engine.serve(queue)
        return queue.results()[0]


@pytest.mark.parametrize(
    ("sampler", "processors", "said"),
    [
        (Sampler.exact, None, "it has no --logits-processors, and rollout.sampler=exact needs"),
        (Sampler.exact, [SAMPLER, "mine:Other"], "mine:Other, and those other than"),
        (Sampler.vllm, ["mine:Other"], "change what is sampled"),
        (Sampler.vllm, [SAMPLER], None),  # rows without its parameters are none of its
        (Sampler.vllm, None, None),
    ],
)
def test_a_server_that_draws_its_tokens_otherwise_is_refused_by_its_processors(
    http, digits_task, tmp_path, sampler, processors, said
):
    """Without the sampler a server in the same mode takes the likeliest tokens, with logits for
    log-probs, and nothing else tells.
    """
    mode = EXACT if sampler is Sampler.exact else RAW
    answers = VllmAnswers(processors=processors, mode=mode)
    expected = nullcontext()
    if said is not None:
        expected = pytest.raises(ConfigError, match=said)
    with expected, engine_over(http, digits_task.model, tmp_path, answers, sampler=sampler):
        pass


def test_a_server_on_a_cpu_is_refused_for_families_of_which_vllm_makes_other_log_probs_there(
    http, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ernie4_5_moe"}))
    model = ModelConfig(path=str(tmp_path), dtype=Dtype.float32)
    http.answers = VllmAnswers(device="cuda")
    examined(http, model)
    http.answers = VllmAnswers(device="cpu")
    with pytest.raises(ConfigError, match="vLLM on a CPU computes other log-probs of ernie4_5_moe"):
        examined(http, model)


@pytest.mark.parametrize(
    ("dtype", "overrides", "float32_head", "said"),
    [
        ("bfloat16", {}, True, 'start it with --hf-overrides \'{"head_dtype": "float32"}\''),
        ("bfloat16", {"head_dtype": "float32"}, False, "start it without head_dtype"),
        ("bfloat16", {"head_dtype": "float32"}, True, None),
        ("bfloat16", {}, False, None),
        ("float32", {}, True, None),
    ],
)
def test_a_server_whose_head_has_another_number_type_than_the_trainers_is_refused(
    http, dtype, overrides, float32_head, said
):
    """Its log-probs have digits of bfloat16, and nothing else tells."""
    http.answers = VllmAnswers(dtype=dtype, hf_overrides=overrides)
    model = ModelConfig(path="m", dtype=Dtype(dtype), float32_head=float32_head)
    expected = nullcontext()
    if said is not None:
        expected = pytest.raises(ConfigError, match=re.escape(said))
    with expected:
        examined(http, model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"vllm_config.model_config.quantization": "fp8"}, "start it without --quantization"),
        ({"vllm_config.cache_config.cache_dtype": "fp8_e4m3"}, "without --kv-cache-dtype"),
        ({"vllm_config.cache_config.cache_dtype": "float16"}, "without --kv-cache-dtype"),
        ({"vllm_config.cache_config.cache_dtype": "bfloat16"}, None),  # as the model
        ({"vllm_config.cache_config.mamba_cache_dtype": "float16"}, "--mamba-cache-dtype"),
        ({"vllm_config.cache_config.mamba_ssm_cache_dtype": "float16"}, "--mamba-ssm-cache-dtype"),
        ({"vllm_config.cache_config.mamba_ssm_cache_dtype": "float32"}, None),
        (
            {"vllm_config.model_config.model_class_overrides": {"A": "b:C"}},
            "--model-class-overrides",
        ),
        ({"vllm_config.parallel_config.enable_eplb": True}, "--enable-eplb"),
        ({"vllm_config.watermark_config": {"algorithm": "gumbel"}}, "--watermark-config"),
        ({"vllm_config.speculative_config": {"method": "ngram"}}, "without --speculative-config"),
        ({"vllm_config.kv_transfer_config": {"kv_connector": "O"}}, "--kv-offloading-size"),
        ({"vllm_env.VLLM_FLOAT32_MATMUL_PRECISION": "high"}, None),  # it has no such products
        ({"vllm_env": []}, "it does not describe itself as"),
        ({"vllm_config.cache_config": 7}, "it does not describe itself as"),
    ],
)
def test_a_server_with_a_setting_that_changes_samples_or_log_probs_is_refused_by_its_flag(
    http, settings, said
):
    """Nothing else tells: not the number type of its model, nor its config."""
    http.answers = VllmAnswers(dtype="bfloat16", settings=settings)
    expected = nullcontext()
    if said is not None:
        expected = pytest.raises(ConfigError, match=re.escape(said))
    with expected:
        examined(http, ModelConfig(path="m", dtype=Dtype.bfloat16))


def test_a_server_with_shorter_products_of_float32_is_refused(http):
    http.answers = VllmAnswers(settings={"vllm_env.VLLM_FLOAT32_MATMUL_PRECISION": "high"})
    with pytest.raises(ConfigError, match="products of float32 have fewer bits"):
        examined(http, ModelConfig(path="m", dtype=Dtype.float32))


def test_a_server_that_could_not_load_weights_is_not_left_paused(http, digits_task, tmp_path):
    """Whoever asks it would wait for ever: the run has ended, and nobody else lets it go on."""
    answers = VllmAnswers()
    weights = load_file(digits_task.model / "model.safetensors")
    with engine_over(http, digits_task.model, tmp_path, answers) as engine:
        answers.refusals = [(400, b"no such method")]
        with pytest.raises(RunError, match=r"no such method.*'loading .*it goes on with some of"):
            engine.load_weights(weights.items(), 1)
        assert not answers.paused
        with pytest.raises(RunError, match="cannot be used any more"):
            engine.serve(LocalQueue([REQUEST]))


def test_a_server_is_not_left_paused_where_another_one_fails(http, digits_task, tmp_path):
    class Slow(VllmAnswers):
        def __call__(self, path, body):
            if path == "/collective_rpc" and self.loads:
                time.sleep(0.2)
            return super().__call__(path, body)

    both = [VllmAnswers(), Slow()]
    weights = load_file(digits_task.model / "model.safetensors")
    with (
        http_server() as second,
        engine_over(http, digits_task.model, tmp_path, [*both], second) as engine,
    ):
        both[0].refusals = [(400, b"no such method")]
        with pytest.raises(RunError, match="no such method"):
            engine.load_weights(weights.items(), 1)
        assert [answers.paused for answers in both] == [False, False]


def test_a_server_whose_worker_was_killed_while_it_loaded_weights_goes_on_with_the_next_engine(
    http, digits_task, tmp_path
):
    """The files of that worker's weights go as well, whatever host it was on."""
    dead = "d" * 32
    left = tmp_path / f"siirl-weights-{'0' * 16}-{dead}" / "version=3"
    left.mkdir(parents=True)
    answers = VllmAnswers()
    answers.paused = True
    answers.loaded = f"loading {dead}-3"
    http.answers = answers
    config = ServerConfig(
        urls=[f"http://127.0.0.1:{http.server_port}"], weights_folder=str(tmp_path)
    )
    model = ModelConfig(path=str(digits_task.model), dtype=Dtype.float32)
    rollout = RolloutConfig(engine=Engine.server, server=config)
    (found,) = examine_servers(Config(model=model, rollout=rollout))
    assert "it is paused" in found.said
    with engine_over(http, digits_task.model, tmp_path, answers):
        assert not answers.paused
        assert not left.exists()


def test_weights_are_loaded_again_where_a_server_has_keys_of_those_before(
    http, digits_task, tmp_path
):
    """They would be mixed with queries of the new ones, and nothing else tells."""
    answers = VllmAnswers()
    answers.forgets = [False, True]
    with engine_over(http, digits_task.model, tmp_path, answers):
        assert answers.loads == 2


def test_other_weights_of_the_same_version_are_told_from_those_before(http, digits_task, tmp_path):
    """As two agents' adapters are, which take turns on one engine."""
    answers = VllmAnswers()
    weights = load_file(digits_task.model / "model.safetensors")
    with engine_over(http, digits_task.model, tmp_path, answers) as engine:
        engine.load_weights(weights.items(), 1)
        before = answers.loaded
        engine.load_weights(weights.items(), 1)
        assert answers.loaded != before
        answers.labels = [before]
        queue = LocalQueue([REQUEST])
        engine.serve(queue)
        assert len(queue.results()) == 1
        assert not answers.labels
    asked = [path for path, body in http.asked if path.endswith("/generate") and body]
    assert len(asked) == 2


def test_an_engine_takes_no_weights_to_a_server_that_somebody_else_has_by_now(
    http, digits_task, tmp_path
):
    answers = VllmAnswers()
    weights = load_file(digits_task.model / "model.safetensors")
    with engine_over(http, digits_task.model, tmp_path, answers) as engine:
        answers.loaded = "another-1"
        with pytest.raises(RunError, match="somebody else has replaced its weights"):
            engine.load_weights(weights.items(), 1)
        assert answers.loads == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"max_position_embeddings": 7, "dtype": "bfloat16", "unknown": 1}, None),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001 there"),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            "rope_parameters.rope_theta is 1000000.0 there and 10000.0 here",
        ),
    ],
)
@pytest.mark.parametrize("says_it", [True, False])
def test_a_server_of_another_model_that_takes_the_weights_is_refused(
    http, digits_task, tmp_path, changed, said, says_it
):
    """It says its config with the extension; without it, its folder may be here."""
    config = json.loads((digits_task.model / "config.json").read_text()) | changed
    answers = VllmAnswers()
    if says_it:
        answers.config = config
    else:
        (tmp_path / "config.json").write_text(json.dumps(config))
        answers.more["model"] = str(tmp_path)
    http.answers = answers
    expected = nullcontext()
    if said is not None:
        expected = pytest.raises(ConfigError, match=re.escape(said))
    with expected:
        examined(http, ModelConfig(path=str(digits_task.model), dtype=Dtype.float32))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"architectures": ["Another"], "head_dtype": "float32"}, None),
        ({"rope_theta": 1e6}, "by its --hf-overrides"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001 there"),
    ],
)
def test_a_server_with_overrides_of_its_models_config_is_refused(
    http, digits_task, overrides, said
):
    http.answers = VllmAnswers(hf_overrides=overrides)
    expected = nullcontext()
    if said is not None:
        expected = pytest.raises(ConfigError, match=re.escape(said))
    with expected:
        examined(http, ModelConfig(path=str(digits_task.model), dtype=Dtype.float32))


class Clock:
    """The time, of which a server's answers take so much that the test says."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(
    ("seconds", "error", "said"),
    [
        ((30.0, 700.0), OutOfReachError, None),  # it was in reach for most of the time
        ((30.0,) * 5, OutOfReachError, "it has failed 3 times: its connection ended"),
        ((3600.0, 3600.0), SilentError, "out of reach for 600 seconds"),  # it never was
        ((1.0,) * 130, OutOfReachError, "out of reach for 600 seconds"),
    ],
)
def test_the_patience_is_for_a_server_that_is_out_of_reach_and_not_for_a_long_response(
    monkeypatch, seconds, error, said
):
    clock = Clock()
    monkeypatch.setattr(connection, "time", clock)
    monkeypatch.setattr(
        connection, "asyncio", SimpleNamespace(sleep=clock.sleep, Lock=asyncio.Lock)
    )
    waiting = [*seconds]

    async def attempt():
        if not waiting:
            return "answered"
        clock.now += waiting.pop(0)
        raise error("its connection ended")

    rollout = RolloutConfig(engine=Engine.server, server=SERVER)
    expected = nullcontext()
    if said is not None:
        expected = pytest.raises(RunError, match=said)
    with expected:
        server = VllmServer(URL, rollout, 2, lambda: None)
        assert asyncio.run(server.patiently("/generate", attempt)) == "answered"


def test_a_server_whose_engine_has_died_has_time_to_end_before_it_has_failed(monkeypatch):
    """Until it ends it answers each request at once, with 500."""
    clock = Clock()
    monkeypatch.setattr(connection, "time", clock)
    monkeypatch.setattr(
        connection, "asyncio", SimpleNamespace(sleep=clock.sleep, Lock=asyncio.Lock)
    )

    async def attempt():
        if clock.now < 1:
            raise connection._FailedError("500 the engine is dead")
        if clock.now < 60:
            raise OutOfReachError("connection refused")
        return "answered"

    rollout = RolloutConfig(engine=Engine.server, server=SERVER)
    server = VllmServer(URL, rollout, 2, lambda: None)
    assert asyncio.run(server.patiently("/generate", attempt)) == "answered"


def test_a_server_that_gives_no_answer_in_time_is_one_that_is_silent(http):
    http.answers = [(None, Queue())]
    config = replace(SERVER, timeout=0.2)

    async def ask():
        rollout = RolloutConfig(engine=Engine.server, server=config)
        server = VllmServer(f"http://127.0.0.1:{http.server_port}", rollout, 2, lambda: None)
        try:
            await server.ask_once("POST", "/inference/v1/generate", {})
        finally:
            server.close()

    with pytest.raises(SilentError):
        asyncio.run(ask())


def test_a_connection_whose_host_is_gone_is_ended_by_the_system(http):
    """Nothing comes from there that would end it: a response was waited for until its timeout."""
    http.answers = [(None, Queue())]

    async def options():
        client = EndingClient(force_instance=True)
        answer = asyncio.ensure_future(client.ask(f"http://127.0.0.1:{http.server_port}/"))
        while not http.asked:
            await asyncio.sleep(0.01)
        (stream,) = client._connections._open
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        found = [stream.socket.getsockopt(socket.IPPROTO_TCP, name) for name in names]
        found.append(stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        client.close()
        await asyncio.wait([answer])
        assert answer.exception() is not None
        return found

    idle, interval, number, is_on = asyncio.run(options())
    assert is_on
    assert idle + interval * number == 120


def test_a_server_stops_generating_for_a_call_that_failed(http, digits_task, tmp_path):
    ended = Queue()

    class Refusing(VllmAnswers):
        begun = 0

        def __call__(self, path, body):
            if not path.endswith("/generate") or body is None or self.begun == 2:
                return super().__call__(path, body)
            self.begun += 1
            if self.begun == 1:
                return None, ended
            return 400, b"no room"

    with engine_over(http, digits_task.model, tmp_path, Refusing()) as engine:
        with pytest.raises(RunError, match="no room"):
            engine.serve(LocalQueue([REQUEST, replace(REQUEST, seed=4)]))
        assert ended.get(timeout=20) == b"", "its connection was closed"
        queue = LocalQueue([REQUEST])
        engine.serve(queue)
        assert queue.results()[0].token_ids == [5] * 4


def rows_of(engine, number=8):
    """Rows of as many requests, whose prompts are those of either of two servers."""
    queue = LocalQueue([replace(REQUEST, prompt=[1, 2 + row], seed=row) for row in range(number)])
    engine.serve(queue)
    return [row.token_ids for row in queue.results()]


def generated(server):
    return sum(path.endswith("/generate") and body is not None for path, body in server.asked)


def test_a_server_that_is_gone_leaves_its_requests_to_the_other_at_once(
    http, digits_task, tmp_path
):
    """They waited for it for all of rollout.server.patience, and ended the run then."""
    asked = Queue()

    class Silent(VllmAnswers):
        def __call__(self, path, body):
            if path.endswith("/generate") and body is not None:
                asked.put(path)
                return None, Queue()
            return super().__call__(path, body)

    both = [VllmAnswers(), Silent()]
    with ExitStack() as second:
        gone = second.enter_context(http_server())
        settings = {"max_rows": 4}  # the others come once it is gone
        with engine_over(http, digits_task.model, tmp_path, [*both], gone, **settings) as engine:

            def end():
                asked.get(timeout=60)
                second.close()
                for connection in gone.waiting:
                    with suppress(OSError):  # it has ended by now
                        connection.shutdown(socket.SHUT_RDWR)

            with ThreadPoolExecutor(1) as thread:
                ended = thread.submit(end)
                assert rows_of(engine, 16) == [[5] * 4] * 16
                ended.result()
            assert generated(http) == 16
            weights = load_file(digits_task.model / "model.safetensors")
            engine.load_weights(weights.items(), 1)
            assert rows_of(engine) == [[5] * 4] * 8
    assert both[0].loaded != both[1].loaded


def test_what_a_server_has_under_way_that_does_not_answer_is_taken_from_it(
    http, digits_task, tmp_path
):
    """Where its host is gone nobody ends those connections."""

    class Silent(VllmAnswers):
        def __call__(self, path, body):
            if path.endswith("/generate") and body is not None:
                return None, Queue()
            return super().__call__(path, body)

    prompts = ([1, token] for token in range(64))
    prompt = next(prompt for prompt in prompts if choose_server(prompt, [0, 0]) == 1)
    both = [VllmAnswers(), Silent()]
    with ExitStack() as second:
        gone = second.enter_context(http_server())
        with engine_over(http, digits_task.model, tmp_path, [*both], gone) as engine:
            own = engine._servers

            async def respond():
                async with own.looked_for():
                    request = replace(REQUEST, prompt=prompt)
                    answer = asyncio.ensure_future(own.respond(request, []))
                    while not gone.waiting:
                        await asyncio.sleep(0.01)
                    await asyncio.to_thread(second.close)
                    own._lose(own._servers[1], UnansweredError("no answer"))
                    return await asyncio.wait_for(answer, 15)

            found = engine._loop.run_until_complete(respond())
            assert found.generation.token_ids == [5] * 4


def test_a_server_that_is_there_again_gets_the_weights_and_requests(http, digits_task, tmp_path):
    class Slow(VllmAnswers):
        def __call__(self, path, body):
            if path.endswith("/generate") and body is not None:
                time.sleep(0.2)
            return super().__call__(path, body)

    with ExitStack() as second:
        gone = second.enter_context(http_server())
        port = gone.server_port
        both = [Slow(), VllmAnswers()]
        settings = {"max_rows": 4}
        with engine_over(http, digits_task.model, tmp_path, [*both], gone, **settings) as engine:
            second.close()
            assert rows_of(engine, 4) == [[5] * 4] * 4
            with http_server(port) as again:
                again.answers = VllmAnswers()
                assert rows_of(engine, 80) == [[5] * 4] * 80
                assert again.answers.loads == 1
                assert again.answers.loaded == both[0].loaded
                assert generated(again)


def test_an_engine_starts_without_a_server_that_is_away_and_has_it_once_it_is_there(
    http, digits_task, tmp_path
):
    """As a run does that goes on after it has lost a host, with a worker and a server."""
    dead = "d" * 32
    left = tmp_path / f"siirl-weights-{'0' * 16}-{dead}" / "version=3"
    left.mkdir(parents=True)
    with http_server() as server:
        port = server.server_port
    away = SimpleNamespace(server_port=port)
    answers = VllmAnswers()
    with engine_over(http, digits_task.model, tmp_path, [answers, None], away) as engine:
        assert rows_of(engine) == [[5] * 4] * 8
        with http_server(port) as again:
            again.answers = VllmAnswers()
            again.answers.loaded = f"{dead}-version=3"
            until = time.monotonic() + 30
            while not again.answers.loads and time.monotonic() < until:
                assert rows_of(engine) == [[5] * 4] * 8
            assert again.answers.loaded == answers.loaded
            assert not left.exists()
            weights = load_file(digits_task.model / "model.safetensors")
            engine.load_weights(weights.items(), 1)
            assert again.answers.loaded == answers.loaded


def test_a_server_that_comes_later_and_would_sample_otherwise_is_refused(
    http, digits_task, tmp_path
):
    with http_server() as server:
        port = server.server_port
    away = SimpleNamespace(server_port=port)

    def serve(engine):
        until = time.monotonic() + 30
        while time.monotonic() < until:
            rows_of(engine)

    with (
        engine_over(http, digits_task.model, tmp_path, [VllmAnswers(), None], away) as engine,
        http_server(port) as again,
    ):
        again.answers = VllmAnswers(processors=None)
        with pytest.raises(ConfigError, match="it has no --logits-processors"):
            serve(engine)


def test_a_server_that_was_lost_as_it_should_go_on_is_not_found_paused(http, digits_task, tmp_path):
    """It has the weights in use by then, and requests would wait there until their timeout."""

    class Deaf(VllmAnswers):
        deaf = 0

        def __call__(self, path, body):
            if path == "/resume" and self.deaf:
                self.deaf -= 1
                return 503, b"busy"
            return super().__call__(path, body)

    both = [VllmAnswers(), Deaf()]
    weights = load_file(digits_task.model / "model.safetensors")
    with (
        http_server() as second,
        engine_over(http, digits_task.model, tmp_path, [*both], second) as engine,
    ):
        both[1].deaf = 2  # the end of the load, and of the one that failed
        engine.load_weights(weights.items(), 1)
        until = time.monotonic() + 30
        while both[1].paused and time.monotonic() < until:
            assert rows_of(engine) == [[5] * 4] * 8
        assert not both[1].paused
        assert both[1].loaded == both[0].loaded


def test_requests_wait_for_servers_where_none_is_there_and_then_name_one(
    http, digits_task, tmp_path
):
    class Ending(VllmAnswers):
        def __call__(self, path, body):
            if self.loads and path != "/server_info":
                return 503, b"it ends"
            return super().__call__(path, body)

    both = [VllmAnswers(), VllmAnswers()]
    with (
        http_server() as second,
        engine_over(http, digits_task.model, tmp_path, [*both], second, patience=1.0) as engine,
    ):
        for server in (http, second):
            server.answers = Ending()
            server.answers.loads = 1
        with pytest.raises(RunError, match=r"out of reach for 1 seconds.*it ends"):
            rows_of(engine)
        for server, answers in zip((http, second), both, strict=True):
            server.answers = answers
        assert rows_of(engine) == [[5] * 4] * 8


def test_a_request_at_which_servers_fail_in_turn_ends_the_run_at_the_third(
    http, digits_task, tmp_path
):
    """Each of them would end of it, as often as somebody starts it."""

    class Failing(VllmAnswers):
        def __call__(self, path, body):
            if path.endswith("/generate") and body is not None:
                return 500, b"the engine is dead"
            return super().__call__(path, body)

    with (
        http_server() as second,
        engine_over(http, digits_task.model, tmp_path, [Failing(), Failing()], second) as engine,
    ):
        with pytest.raises(RunError, match="failed 3 times: 500 the engine is dead"):
            rows_of(engine, 1)
        assert generated(http) + generated(second) == 3


def test_a_server_that_was_started_again_with_other_options_is_refused(http, digits_task, tmp_path):
    """Its tokens would be drawn otherwise from then on."""
    answers = VllmAnswers()
    with engine_over(http, digits_task.model, tmp_path, answers) as engine:
        answers.loaded = "default"
        answers.processors = None
        with pytest.raises(ConfigError, match="it has no --logits-processors"):
            rows_of(engine)
    answers = VllmAnswers()
    with engine_over(http, digits_task.model, tmp_path, answers) as engine:
        answers.loaded = "default"
        answers.more["max_model_len"] = 32
        with pytest.raises(ConfigError, match="takes 32 tokens, where the run began with 64"):
            rows_of(engine)


def test_a_token_that_the_model_does_not_have_is_an_error_that_names_the_server(
    http, digits_task, tmp_path
):
    """A trainer would look it up outside its embedding."""

    class Strange(VllmAnswers):
        def __call__(self, path, body):
            if path.endswith("/generate") and body is not None:
                return 200, answer_of([5, 5, 5, 10**6], [0.5] * 4, label=self.loaded)
            return super().__call__(path, body)

    refused = pytest.raises(RunError, match="it sampled the token 1000000, and the model has")
    with engine_over(http, digits_task.model, tmp_path, Strange()) as engine, refused:
        rows_of(engine)


def test_a_server_that_a_killed_worker_left_paused_goes_on_as_the_run_ends(http):
    """Others would wait for it until the next run."""
    http.answers = VllmAnswers()
    config = Config(
        rollout=RolloutConfig(
            engine=Engine.server,
            server=ServerConfig(
                urls=[f"http://127.0.0.1:{http.server_port}", "http://127.0.0.1:1"],
                weights_folder="/weights",
            ),
        )
    )
    said = []

    def fail():
        with servers_go_on(config, said.append):
            http.answers.paused = True
            raise RunError("the run's own")

    with pytest.raises(RunError, match="the run's own"):
        fail()
    assert not http.answers.paused
    assert len(said) == 1
    assert "was left paused" in said[0]
    with servers_go_on(config, said.append):
        pass
    assert len(said) == 1


def test_a_response_of_other_weights_is_asked_for_again(http, digits_task, tmp_path):
    answers = VllmAnswers("another", "another")
    assert served(http, digits_task.model, tmp_path, answers).token_ids == [5] * 4
    asked = [path for path, body in http.asked if path.endswith("/generate") and body]
    assert len(asked) == 3


def test_a_response_that_a_server_ends_as_it_is_stopped_is_asked_for_again(
    http, digits_task, tmp_path
):
    """Its first tokens are never taken, nor do they end the run, which goes on with the next server
    there.
    """

    class Stopping(VllmAnswers):
        ends = 2

        def __call__(self, path, body):
            status, answer = super().__call__(path, body)
            if path.endswith("/generate") and body is not None and self.ends:
                self.ends -= 1
                answer = answer_of([5], [0.5], "abort", label=self.loaded)
            return status, answer

    answers = Stopping()
    assert served(http, digits_task.model, tmp_path, answers).token_ids == [5] * 4
    answers = Stopping()
    answers.ends = 3
    with pytest.raises(RunError, match="it has failed 3 times: it has ended the response"):
        served(http, digits_task.model, tmp_path, answers)


def test_a_server_whose_answers_are_never_of_its_weights_is_named(http, digits_task, tmp_path):
    """Such as a proxy in front of several, of which one has the weights."""
    with pytest.raises(RunError, match="expected one server there, and no proxy"):
        served(http, digits_task.model, tmp_path, VllmAnswers(*["another"] * 50))


def test_what_is_under_way_ends_with_the_first_error_and_none_is_taken_after_it():
    ended = []

    async def ask(request):
        if request.seed == 2:
            raise RunError("the second one")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(request.seed)

    queue = LocalQueue([replace(REQUEST, seed=seed) for seed in range(6)])
    with pytest.raises(RunError, match="the second one"):
        asyncio.run(serve_concurrently(queue, 4, ask))
    assert sorted(ended) == [0, 1, 3]
    assert not queue.ended()
