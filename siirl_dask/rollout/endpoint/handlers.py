"""Handles a request to the endpoint, from its headers to the answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from tornado.iostream import StreamClosedError
from tornado.web import HTTPError, RequestHandler, stream_request_body

from siirl_dask.config import EndpointConfig
from siirl_dask.rollout.endpoint.answers import Answer, chat_body, chunks, text_body, up_to_stop
from siirl_dask.rollout.endpoint.conversations import Conversation, SampledTurn, history_of
from siirl_dask.rollout.endpoint.queue import Ticket
from siirl_dask.rollout.endpoint.refusals import Refusal, unauthorized, unknown_model
from siirl_dask.rollout.endpoint.requests import read_request
from siirl_dask.rollout.endpoint.serving import Serving
from siirl_dask.rollout.endpoint.tool_calls import read_message

logger = logging.getLogger("siirl_dask.rollout")


@stream_request_body
class _RequestHandler(RequestHandler):
    """Reads a body of bounded size, and answers errors as JSON."""

    def initialize(self, serving: Serving) -> None:
        self.serving = serving
        self._body = bytearray()
        self._received = 0
        self._known = False
        self._ticket: Ticket | None = None

    def prepare(self) -> None:
        self._known = self._find() is not None

    def data_received(self, chunk: bytes) -> None:
        """Keep what may become a request; the rest is read and forgotten, so that its sender
        hears why.
        """
        self._received += len(chunk)
        if self._known and self._received <= self.serving.config.body_bytes:
            self._body += chunk

    def compute_etag(self) -> None:
        """Answers differ from request to request."""

    def conversation(self) -> Conversation:
        """Return the conversation whose bearer token the request has. Refusal where there is
        none.
        """
        conversation = self._find()
        if conversation is None:
            raise unauthorized()
        return conversation

    def _find(self) -> Conversation | None:
        scheme, _, token = self.request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self.serving.episodes.get(token.strip())

    def body(self) -> bytes:
        """Return the body. Refusal for one that is too large."""
        config: EndpointConfig = self.serving.config
        if self._received > config.body_bytes:
            message = (
                f"the body has {self._received} bytes, more than {config.max_body} "
                "(endpoint.max_body)"
            )
            raise Refusal(413, message, code="body_too_large")
        return bytes(self._body)

    def on_connection_close(self) -> None:
        if self._ticket is not None:
            self._ticket.cancel()

    def write_error(self, status_code: int, **how: Any) -> None:
        """Answer with an error in OpenAI's form."""
        _, error, _ = how.get("exc_info", (None, None, None))
        if not isinstance(error, Refusal):
            reason = {404: "there is no such path", 405: "this path does not have this method"}.get(
                status_code
            )
            error = Refusal(status_code, reason or self._reason)
        self.serving.refused += status_code < 500
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(error.body()))

    def log_exception(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Log what is no answer to a mistake of the client's."""
        if not isinstance(error, (HTTPError, Refusal)):
            logger.error("the endpoint failed to answer %s", self.request.path, exc_info=error)

    def send_error(self, status_code: int = 500, **how: Any) -> None:
        _, error, _ = how.get("exc_info", (None, None, None))
        if isinstance(error, Refusal):
            status_code = error.status
        super().send_error(status_code, **how)


class NotFound(_RequestHandler):
    """Answers any other path."""

    def prepare(self) -> None:
        raise HTTPError(404)


class Models(_RequestHandler):
    """Answers with the one model that there is."""

    def get(self, name: str | None = None) -> None:
        self.conversation()
        known = self.serving.config.model
        if name not in (None, known):
            raise unknown_model(name, known)
        model = {"id": known, "object": "model", "created": 0, "owned_by": "siirl_dask"}
        self.finish(model if name else {"object": "list", "data": [model]})


class _Sampling(_RequestHandler):
    """Has the engine serve a request, and records what it sampled."""

    chat = True

    async def post(self) -> None:
        conversation = self.conversation()
        body = self.body()
        asked = read_request(body, chat=self.chat, config=self.serving.config)
        self.serving.overridden += asked.overridden
        turn = conversation.begin(asked)
        answer = await self._answer(conversation, turn)
        number = conversation.requests
        head = {"id": f"siirl-{turn.request.seed:x}-{number}", "created": int(time.time())}
        head["model"] = self.serving.config.model
        made = (chat_body if self.chat else text_body)(asked, answer, head, self._decode)
        if not asked.stream:
            self.finish(made)
            return
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("Cache-Control", "no-cache")
        try:
            for chunk in chunks(asked, made):
                self.write(chunk)
                await self.flush()
        except StreamClosedError:
            return  # the agent has gone; what was sampled is its own all the same

    async def _answer(self, conversation: Conversation, turn: SampledTurn) -> Answer:
        """Return what the engine samples, which is recorded. A client that has gone by then
        leaves nothing behind.
        """
        engine = self.serving.engine
        asked = turn.asked
        ids = turn.request.prompt
        self._ticket = self.serving.queue.submit(turn.request)
        try:
            generation = await asyncio.wrap_future(self._ticket)
            if self.request.connection.stream.closed():  # type: ignore[union-attr]
                raise _gone()
            generation, text = up_to_stop(generation, asked.stop, engine.tokenizer)
            message: dict[str, Any] = {}
            if self.chat:
                tools = asked.tools if asked.calls_tools else ()
                first = conversation.tool_calls
                message = read_message(
                    engine.tokenizer,
                    generation.token_ids,
                    text=text,
                    prompt=ids,
                    tools=tools,
                    first=first,
                )
                conversation.tool_calls += len(message.get("tool_calls", ()))
        except (
            asyncio.CancelledError
        ) as error:  # by on_connection_close, or because the endpoint closes
            conversation.abandon(turn)
            raise _gone() from error
        except BaseException:
            conversation.abandon(turn)
            raise
        history = history_of(asked, message if self.chat else None, text)
        conversation.finish(turn, generation, engine.version, history)
        return Answer(generation=generation, text=text, message=message, prompt_tokens=len(ids))

    def _decode(self, token: int) -> str:
        return self.serving.engine.tokenizer.decode([token], skip_special=False)


class Chat(_Sampling):
    """Answers ``/v1/chat/completions``."""


class Completions(_Sampling):
    """Answers ``/v1/completions``."""

    chat = False


def _gone() -> Refusal:
    return Refusal(503, "the client or the endpoint has closed the connection", code="closed")
