"""Environments of verifiers, unchanged: ``verifiers:wordle?num_train_examples=100`` is what
``verifiers.load_environment`` loads of an installed package, with options of its own.

The package's own rollout runs, and asks the policy where it would ask a model behind an API: what
it asks with is what the policy sees, and its rubric's reward comes with the end.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib.metadata import version
from textwrap import shorten
from threading import Lock
from types import SimpleNamespace
from typing import Any

import verifiers

from siirl_dask.environments.ecosystems.observations import observed
from siirl_dask.environments.protocol import Failure, Message, Opening, Step, Text
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.planner.spec.ecosystems import EcosystemName

ROWS = None
"""A dataset has as many rows as it has."""
_ENTRY = "entry"
_SPLIT = "split"
_SPLITS = ("train", "eval")
_LONGEST_REASON = 300  # characters
_loading = Lock()


def environment(name: EcosystemName) -> Callable[..., Any]:
    """Return ``VerifiersEnvironment`` with the options of ``name``. PlanError for an environment
    that is not installed or does not take them, and for one with tools or with rewards of whole
    groups.
    """
    options = {key: value for key, value in name.options.items() if key != _SPLIT}
    found = _loaded(name, options)
    if found.tool_defs:
        raise PlanError(
            f"{name.spelled!r} has tools, which an API would call: expected an environment of "
            "messages; docs/endpoint.md trains what calls tools by an API"
        )
    if found.requires_group_rollouts:
        raise PlanError(
            f"{name.spelled!r} rewards the samples of a prompt together: expected rewards of "
            "single episodes"
        )
    return partial(VerifiersEnvironment, id=name.id, options=options)


def rows(name: EcosystemName, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of the environment's dataset, of ``split=eval`` that to evaluate on; with a
    ``seed`` other than 0 in another order. ``entry`` is the row as the package has it.
    """
    options = dict(name.options)
    split = options.pop(_SPLIT, _SPLITS[0])
    if split not in _SPLITS:
        raise PlanError(f"{name.spelled!r}: {_SPLIT}={split!r}: expected one of {[*_SPLITS]}")
    found = _loaded(name, options)
    read = found.get_dataset if split == _SPLITS[0] else found.get_eval_dataset
    for row in read(seed=None if seed == 0 else seed):
        answer = row.get("answer")
        yield {
            "prompt": row["prompt"],
            "answer": "" if answer is None else str(answer),
            _ENTRY: json.dumps(row),
        }


def _loaded(name: EcosystemName, options: Mapping[str, Any]) -> verifiers.Environment:
    try:
        return _environment(name.id, json.dumps(options, sort_keys=True))
    except Exception as error:  # a package raises what it likes over its options
        reason = shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON)
        raise PlanError(f"{name.spelled!r}: verifiers does not load it: {reason}") from error


def _environment(name: str, options: str) -> verifiers.Environment:
    """Return the environment, which all episodes of a process share, as the package means it."""
    with _loading:
        return _loaded_once(name, options)


@lru_cache(maxsize=16)
def _loaded_once(name: str, options: str) -> verifiers.Environment:
    with _signals_kept():
        return verifiers.load_environment(name, **json.loads(options))


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the process's own handlers of signals inside the ``with`` block: an environment would
    take SIGINT and SIGTERM, which end a run, and can do so in the main thread alone.
    """
    kept = SimpleNamespace(
        SIGINT=signal.SIGINT,
        SIGTERM=signal.SIGTERM,
        default_int_handler=signal.default_int_handler,
        signal=_take_no_signal,
    )
    own = base_environment.signal
    base_environment.signal = kept
    try:
        yield
    finally:
        base_environment.signal = own


def _take_no_signal(number: int, handler: object) -> None:
    """Leave the handler of a signal as it is."""


def _check_version() -> None:
    """Raise PlanError for a version whose environments run programs of their own, and have no
    ``load_environment``.
    """
    found = version("verifiers")
    if not found.startswith("0.1."):
        raise PlanError(
            f"verifiers {found} is installed: expected 0.1, whose load_environment packages have; "
            "pip install 'siirl_dask[verifiers]'"
        )


_check_version()
base_environment: Any = importlib.import_module("verifiers.envs.environment")


class _Policy(verifiers.Client[None, Any, str, Any]):  # type: ignore[misc]  # it has no types here
    """The model that a rollout asks: a question waits here until the policy's turn answers it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.questions: asyncio.Queue[Sequence[Any]] = asyncio.Queue()
        self.answers: asyncio.Queue[str] = asyncio.Queue()

    def setup_client(self, config: Any) -> None:
        raise ConfigError("a rollout is asked by the policy of this run, and no other client")

    async def to_native_tool(self, tool: Any) -> Any:
        raise ConfigError(f"the environment has the tool {tool.name!r}: expected messages alone")

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **given: Any
    ) -> str:
        self.questions.put_nowait(prompt)
        return await self.answers.get()

    async def raise_from_native_response(self, response: str) -> None:
        """A turn of the policy is never an error."""

    async def from_native_response(self, response: str) -> Any:
        from verifiers.types import Response, ResponseMessage

        message = ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
        return Response(id="", created=0, model="policy", message=message)

    async def close(self) -> None:
        """Nothing was opened."""


class VerifiersEnvironment:
    """A rollout of an environment of verifiers, in the protocol of this package."""

    def __init__(self, *, id: str, options: Mapping[str, Any] | None = None) -> None:
        """``options`` are those of ``verifiers.load_environment``."""
        plain = {}
        if options is not None:
            plain = dict(options)
        self._environment = _environment(id, json.dumps(plain, sort_keys=True))
        self._policy: _Policy | None = None
        self._rollout: asyncio.Task[Any] | None = None
        self._row: Mapping[str, Any] = {}
        self._heard: list[Message] = []

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening | Failure:
        """Begin the rollout of the row's ``entry``. Return what it asks first."""
        if _ENTRY not in row:
            return Failure("the row has no entry: environments.columns=[prompt, entry]")
        self._row = row
        self._policy = _Policy()
        rollout = self._environment.run_rollout(
            input=json.loads(row[_ENTRY]),
            client=self._policy,
            model="policy",
            sampling_args={},
        )
        self._rollout = asyncio.ensure_future(rollout)
        asked = await self._question()
        if asked is None:
            return Failure("the rollout ended before it asked anything")
        self._heard = asked
        return Opening(prompt=self._shown(asked))

    async def step(self, text: str) -> Step | Failure:
        """Answer what was asked. Return what is asked next, or the rubric's reward."""
        assert self._policy is not None
        assert self._rollout is not None
        self._policy.answers.put_nowait(text)
        asked = await self._question()
        if asked is None:
            output = self._rollout.result()
            if output.get("error") is not None:
                return Failure(f"the rollout failed: {output['error']}")
            metrics = output.get("metrics")
            parts = metrics
            if metrics is None:
                parts = {}
            return Step(reward=float(output["reward"]), done=True, parts=parts)
        before = [*self._heard, {"role": "assistant", "content": text}]
        self._heard = asked
        if asked[: len(before)] != before:
            return Step(history=self._shown(asked))
        new = asked[len(before) :]
        if isinstance(self._row.get("prompt"), str):
            return Step(observation=observed(self._row, _text(new)))
        return Step(observation=new)

    async def close(self) -> None:
        """Give a rollout up that has not ended."""
        if self._rollout is None or self._rollout.done():
            return
        self._rollout.cancel()
        await asyncio.wait([self._rollout])

    async def _question(self) -> list[Message] | None:
        """Return the messages that the rollout asks with next; None where it has ended."""
        assert self._policy is not None
        assert self._rollout is not None
        question = asyncio.ensure_future(self._policy.questions.get())
        await asyncio.wait([question, self._rollout], return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            return [_plain(message) for message in question.result()]
        question.cancel()
        return None

    def _shown(self, messages: Sequence[Message]) -> Text:
        """Return messages as they are, or one text for a model whose prompts are texts."""
        if isinstance(self._row.get("prompt"), str):
            return f"{_text(messages)}\n"
        return messages


def _plain(message: Any) -> Message:
    """Return a message with its role and its text."""
    content = message.content
    return {"role": message.role, "content": content if isinstance(content, str) else str(content)}


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(str(message["content"]) for message in messages)
