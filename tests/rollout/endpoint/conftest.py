"""An endpoint in front of an engine that says what a test wants, with a real tokenizer and chat
template.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import httpx2
import pytest
from openai import OpenAI

from siirl_dask.config import EndpointConfig
from siirl_dask.context import Device, Rank
from siirl_dask.rollout import FinishReason, Generation, Sampling
from siirl_dask.rollout.endpoint import AgentQueue, Bounds, Conversation, Endpoint
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer
from siirl_dask.tasks.tiny_model import tiny_tokenizer

CHAT_ML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content "
    "}}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% "
    "endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML that takes the thoughts out of earlier turns, as Qwen3's template does."""


@pytest.fixture(scope="session")
def tokenizer():
    """Return a tokenizer whose tokens are bytes, and whose ChatML has end tokens."""
    tokenizer = tiny_tokenizer(chat_template=CHAT_ML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return HuggingFaceTokenizer(tokenizer, "tiny")


@dataclass
class Saying:
    """An engine that answers with ``says(request)``, a text or a Generation, and remembers what
    it was asked.
    """

    tokenizer: HuggingFaceTokenizer
    says: object = "hello"
    asked: list = field(default_factory=list)
    version: int = 3
    context_length: int | None = None
    hold: threading.Event | None = None
    """Nothing is answered before it is set."""
    taken: threading.Event = field(default_factory=threading.Event)

    def serve(self, queue):
        while batch := queue.next(4, wait=True):
            self.taken.set()
            if self.hold is not None:
                self.hold.wait(120)
            for ticket, request in batch:
                self.asked.append(request)
                queue.complete(ticket, self._answer(request))

    def _answer(self, request):
        answer = self.says(request) if callable(self.says) else self.says
        if isinstance(answer, Generation):
            return answer
        ids = [*self.tokenizer.encode(answer), *self.tokenizer.encode("<|im_end|>")][
            : request.sampling.max_tokens
        ]
        reason = (
            FinishReason.STOP
            if ids[-1] == self.tokenizer.encode("<|im_end|>")[0]
            else FinishReason.LENGTH
        )
        return Generation(ids, [-0.5 - at / 100 for at in range(len(ids))], reason)


def bounds(**changes):
    return Bounds(**{"prompt": 400, "response": 400, "requests": 8, "segments": 4, **changes})


def conversation(tokenizer, own_prompt=(1, 2), seed=77, **changes):
    return Conversation(tokenizer, own_prompt, seed, Sampling(max_tokens=400), bounds(**changes))


@dataclass
class Served:
    """A running endpoint with one open episode, whose token is ``key``."""

    endpoint: Endpoint
    engine: Saying
    conversation: Conversation
    key: str = "episode-key"

    @property
    def client(self):
        return OpenAI(base_url=self.endpoint.base_url, api_key=self.key, max_retries=0, timeout=30)

    def post(self, path="/chat/completions", *, key="episode-key", **how):
        headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
        return httpx2.post(self.endpoint.base_url + path, headers=headers, timeout=30, **how)

    def ask(self, messages, **more):
        """Ask in a chat; return the body of the answer."""
        answer = self.post(json={"model": "policy", "messages": messages, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def serve(tokenizer):
    """Start an endpoint: ``serve("what the engine says", **config)``."""
    stacks = []

    def start(says="hello", *, hold=None, within=None, **config):
        queue = AgentQueue(Device("w"), lambda: None)
        engine = Saying(tokenizer, says, hold=hold)
        endpoint = Endpoint(engine, queue, EndpointConfig(**config), Rank())
        endpoint.__enter__()
        thread = threading.Thread(target=engine.serve, args=(queue,))
        thread.start()
        served = Served(endpoint, engine, conversation(tokenizer, **(within or {})))
        endpoint.open(served.key, served.conversation)
        stacks.append((endpoint, queue, thread, hold))
        return served

    yield start
    for endpoint, queue, thread, hold in stacks:
        if hold is not None:
            hold.set()
        queue.end()
        thread.join(30)
        assert not thread.is_alive()
        endpoint.__exit__(None, None, None)
