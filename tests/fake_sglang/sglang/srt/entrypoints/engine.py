"""SGLang's ``Engine``, as an offline program calls it. It computes here, and has a process of
its own beside it.
"""

import asyncio
import atexit
import multiprocessing as mp
import os
from types import SimpleNamespace

import psutil
import torch
from transformers import AutoModelForCausalLM

from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.sampler import SamplingParams, sample
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__


class EventLoopPolicy(asyncio.DefaultEventLoopPolicy):
    """Stands in for uvloop's."""


asyncio.set_event_loop_policy(EventLoopPolicy())


def kill_process_tree(parent_pid, include_parent=True, skip_pid=None, wait_timeout=60):
    parent = psutil.Process(parent_pid)
    killed = parent.children(recursive=True) + [parent] * include_parent
    for process in killed:
        process.kill()
    psutil.wait_procs(killed, timeout=wait_timeout)


class Request:
    def __init__(self, ids, params, rid):
        self.ids, self.params, self.rid = list(ids), params, rid
        self.prompt, self.logprobs, self.finished = len(ids), [], None
        self.told = asyncio.Event()

    @property
    def output(self):
        return self.ids[self.prompt :]


class Scheduler:
    """Does what SGLang's scheduler process does: continuous batches, a cache of prompts, weights
    and their memory.
    """

    def __init__(self, args):
        self.args = args
        self.model = AutoModelForCausalLM.from_pretrained(
            args.model_path, dtype=getattr(torch, args.dtype)
        ).eval()
        context, capacity = self.model.config.max_position_embeddings, args.max_total_tokens or 8192
        self.max_req_len = min(context - 1, capacity - 1)
        ends = self.model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends or ())
        self.requests, self.task, self.read = [], None, {}
        self.offload_tags, self.session = set(), False
        self.most, self.loads, self.flushes = 0, [], 0

    def add(self, request):
        assert (
            self.args.max_running_requests is None
            or len(self.requests) < self.args.max_running_requests
        )
        room = self.max_req_len - request.prompt - 1
        request.params.max_new_tokens = max(0, min(request.params.max_new_tokens, room))
        self.requests.append(request)
        self.most = max(self.most, len(self.requests))
        if self.task is None or self.task.done():
            self.task = asyncio.ensure_future(self.run())

    async def run(self):
        while self.requests:
            await asyncio.sleep(0)  # others may arrive
            all_greedy = all(request.params.greedy for request in self.requests)
            for request in list(self.requests):
                self.step(request, all_greedy)

    @torch.no_grad()
    def step(self, request, all_greedy):
        if request.finished is None:
            logits = self.logits(tuple(request.ids), prompt=not request.output)
            token, logprob = sample(
                logits.float(), request.params, len(request.ids) - 1, all_greedy=all_greedy
            )
            request.ids.append(token)
            request.logprobs.append((logprob, token, None))
            stops = self.ends | set(request.params.stop_token_ids or ())
            if token in stops and not request.params.ignore_eos:
                request.finished = {"type": "stop", "matched": token}
            elif len(request.output) >= request.params.max_new_tokens:
                request.finished = {"type": "length", "length": request.params.max_new_tokens}
        if request.finished is not None:
            self.requests.remove(request)
        if request.finished is not None or len(request.output) % self.args.stream_interval == 0:
            request.told.set()

    def logits(self, ids, *, prompt):
        assert not self.offload_tags, "memory that sleeps was used"
        if ids in self.read:
            return self.read[ids]
        found = self.model(torch.tensor([ids])).logits[0, -1]
        if prompt and not self.args.disable_radix_cache:
            self.read[ids] = found
        return found

    def abort(self):
        for request in self.requests:
            request.finished = {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }

    def flush_cache(self):
        if self.requests:
            return False
        self.read.clear()
        self.flushes += 1
        return True

    def release(self, tags):
        assert not self.requests, (
            "release_memory_occupation should be called only when server is idle."
        )
        if not self.args.enable_memory_saver:
            return
        self.offload_tags |= set(tags)
        if "kv_cache" in tags:
            self.flush_cache()
        if "weights" in tags:
            for weight in self.model.parameters():
                weight.data.fill_(torch.nan)

    def resume(self, tags):
        for tag in tags if self.args.enable_memory_saver else ():
            self.offload_tags.remove(tag)

    def load(self, named_tensors):
        assert "weights" not in self.offload_tags, "memory that sleeps was written"
        known = dict(self.model.named_parameters())
        for name, tensor in named_tensors:
            tensor.share_memory_()  # as the pickle of a tensor does
            if name in known:  # SGLang's models leave others out without a word
                known[name].data.copy_(tensor)
        self.loads.append([name for name, _ in named_tensors])


class Engine:
    server_args_class = ServerArgs

    def __init__(self, **kwargs):
        self.server_args = self.server_args_class(**kwargs)
        self.server_args.check_server_args()
        mp.set_start_method("spawn", force=True)
        atexit.register(self.shutdown)
        pipe, theirs = mp.Pipe()
        self._process = mp.Process(target=run_scheduler_process, args=(None, theirs))
        self._process.start()
        theirs.close()
        assert pipe.recv() == {"status": "ready"}
        self._pipe = pipe
        self.scheduler = Scheduler(self.server_args)
        self.tokenizer_manager = SimpleNamespace(abort_request=self._abort_request)
        self.loop = asyncio.new_event_loop()

    def get_all_child_pids(self):
        return [self._process.pid]

    def get_server_info(self):
        return {"max_req_input_len": self.scheduler.max_req_len - 5, "version": __version__}

    async def async_generate(
        self,
        prompt=None,
        sampling_params=None,
        input_ids=None,
        return_logprob=False,
        stream=False,
        rid=None,
    ):
        assert asyncio.get_running_loop() is self.loop
        request = Request(input_ids, SamplingParams(**sampling_params), rid)
        self.scheduler.add(request)
        if stream is True:
            return self._reports(request, return_logprob)
        raise NotImplementedError("siirl_dask streams")

    async def _reports(self, request, return_logprob):
        while True:
            await request.told.wait()
            request.told.clear()
            told = {
                "id": request.rid,
                "finish_reason": request.finished,
                "prompt_tokens": request.prompt,
            }
            if return_logprob:
                told["output_token_logprobs"] = request.logprobs
            yield {"output_ids": request.output, "meta_info": told}
            if request.finished is not None:
                return

    def _abort_request(self, rid="", abort_all=False):
        assert abort_all
        self.scheduler.abort()

    def begin_weight_update(self, selector="all"):
        if self.scheduler.session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.scheduler.session = True
        return True, "Success"

    def end_weight_update(self):
        if not self.scheduler.session:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self.scheduler.session = False
        return True, "Success"

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        if not self.scheduler.session:
            return (
                False,
                "update_weights_from_tensor must run between begin_weight_update() and "
                "end_weight_update()",
            )
        self.scheduler.load(named_tensors)
        return True, "Success"

    def flush_cache(self):
        return SimpleNamespace(success=self.scheduler.flush_cache(), message="")

    def release_memory_occupation(self, tags=None):
        self.scheduler.release(tags or ["kv_cache", "weights", "cuda_graph"])

    def resume_memory_occupation(self, tags=None):
        self.scheduler.resume(tags or ["kv_cache", "weights", "cuda_graph"])

    def shutdown(self):
        """End all children of this process, as SGLang's does."""
        kill_process_tree(os.getpid(), include_parent=False, wait_timeout=60)
