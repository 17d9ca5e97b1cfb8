"""A stand-in for SGLang's server: the HTTP API of release 0.5.23 that siirl_dask asks, as its source
has it, over the scheduler of ``tests/fake_sglang``. It runs in a thread of the test.
"""

import asyncio
import json
import threading
from pathlib import Path

from safetensors.torch import load_file
from sglang.srt.entrypoints.engine import Request, Scheduler
from sglang.srt.sampler import SamplingParams
from sglang.srt.server_args import ServerArgs
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, RequestHandler

ARGUMENTS = {
    "enable_deterministic_inference": True,
    "preferred_sampling_params": None,
    "allow_auto_truncate": False,
    "rl_on_policy_target": None,
    "speculative_algorithm": None,
    "weight_cache_mode": "off",
    "disaggregation_mode": "null",
    "weight_version": "default",
    "json_model_override_args": "{}",
    "enable_fp32_lm_head": False,
    "dtype": "float32",
    "device": "cuda",
}


class SglangHttpServer:
    """One server, from ``with`` to its end. ``arguments`` replaces what it says of itself."""

    def __init__(self, folder, **arguments):
        self.folder = folder
        self.described = {**ARGUMENTS, **arguments}
        self.answered = []
        self.busy = 0
        """Times that its cache is not flushed, as while it takes back requests."""
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *exception):
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    def restart(self):
        """Lose weights and label, as a server that is started again does."""
        self.weight_version = "default"
        self.scheduler = Scheduler(ServerArgs(model_path=str(self.folder), dtype="float32"))
        for weight in self.scheduler.model.parameters():
            weight.data.mul_(0.5)  # the server was not started with the run's model

    def _serve(self):
        asyncio.run(self._run())

    async def _run(self):
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.restart()
        listener, self._port = bind_unused_port()
        routes = [
            ("/server_info", _ServerInfo),
            ("/model_info", _ModelInfo),
            ("/generate", _Generate),
            ("/update_weights_from_disk", _Update),
        ]
        server = HTTPServer(Application([(path, kind, {"of": self}) for path, kind in routes]))
        server.add_socket(listener)
        self._started.set()
        await self._ended.wait()
        server.stop()
        await server.close_all_connections()


class _Handler(RequestHandler):
    def initialize(self, of):
        self.of = of


class _ServerInfo(_Handler):
    def get(self):
        longest = self.of.scheduler.max_req_len - 5
        self.write(
            {
                **self.of.described,
                "model_path": str(self.of.folder),
                "max_req_input_len": longest,
                "version": "0.5.23",
            }
        )


class _ModelInfo(_Handler):
    def get(self):
        self.write({"weight_version": self.of.weight_version})


class _Generate(_Handler):
    async def post(self):
        body = json.loads(self.request.body)
        params = SamplingParams(**body["sampling_params"])
        request = Request(body["input_ids"], params, "0")
        self.of.scheduler.add(request)
        while request.finished is None:
            await request.told.wait()
            request.told.clear()
        self.of.answered.append(self.of.weight_version)
        self.write(
            json.dumps(
                {
                    "output_ids": request.output,
                    "meta_info": {
                        "id": request.rid,
                        "finish_reason": request.finished,
                        "weight_version": self.of.weight_version,
                        "output_token_logprobs": request.logprobs,
                    },
                }
            )
        )


class _Update(_Handler):
    async def post(self):
        body = json.loads(self.request.body)
        while self.of.scheduler.requests:  # as a lock that writers wait for
            await asyncio.sleep(0.01)
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            self.set_status(400)
            self.write({"success": False, "message": "Failed to get weights iterator"})
            return
        for path in files:
            self.of.scheduler.load(load_file(path).items())
        if body["flush_cache"] and self.of.busy:
            self.of.busy -= 1
            self.set_status(400)
            message = (
                "Weights were updated, but the cache was not flushed because requests are still"
            )
            self.write({"success": False, "message": f"{message} running or queued."})
            return
        if body["flush_cache"]:
            self.of.scheduler.flush_cache()
        self.of.weight_version = body["weight_version"]
        self.write({"success": True, "message": "Succeeded to update model weights."})
