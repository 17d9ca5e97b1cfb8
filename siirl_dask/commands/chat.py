"""``siirl-dask chat``: answers prompts with the model of a run's checkpoint, or of a folder, in
this process.

A prompt reaches the model as the run's own did: through the chat template, or as a text that the
model continues. The transformers engine draws the tokens, so the most likely response is the one
that ``siirl-dask eval`` scores.
"""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa

from siirl_dask.config import Config
from siirl_dask.config.file import load_text
from siirl_dask.errors import ConfigError, DataError, Interrupted, counted
from siirl_dask.models.cache import local_folder
from siirl_dask.observe import printable
from siirl_dask.rollout import FinishReason, GenerationRequest, Sampling
from siirl_dask.runs.checkpoint_model import is_run_or_model
from siirl_dask.runs.checkpoints import Checkpoint
from siirl_dask.runs.export import config_of_role, write_folder
from siirl_dask.runs.reader import Run
from siirl_dask.runs.samples.rollouts import open_newest
from siirl_dask.runs.whole_checkpoint import with_whole_checkpoint
from siirl_dask.schema import PROMPT
from siirl_dask.wording import redacted

if TYPE_CHECKING:
    from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer
    from siirl_dask.rollout.transformers_engine.engine import TransformersEngine

_NEW = "/new"
_HELD = "\N{REPLACEMENT CHARACTER}"
"""End of a text whose last character has tokens that are still to come."""


def chat(chosen: Namespace, short: Mapping[str, str]) -> None:
    """Answer ``--prompt``, or each line of standard input until that ends. ConfigError, before
    anything is written to standard output, where the model or an option cannot be used.
    """
    # SIGTERM ends a conversation; Ctrl-C ends an answer, and between answers the conversation
    signal.signal(signal.SIGTERM, _end)
    with _speaker_of(chosen, short) as (speaker, source):
        _remark(f"{source}: {speaker.described}")
        if chosen.prompt is None:
            _converse(speaker)
            return
        speaker.answer(chosen.prompt)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted("stopped by SIGTERM")


def _converse(speaker: Speaker) -> None:
    on_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout))
    if on_terminal:
        _remark(f"{_NEW} begins another conversation, Ctrl-C stops an answer, Ctrl-D ends")
    for line in _lines(on_terminal):
        if line.strip() == _NEW:
            speaker.begin()
            continue
        try:
            speaker.answer(line)
        except ContextFull as error:
            _remark(f"{error}; {_NEW} begins another conversation")


def _lines(on_terminal: bool) -> Iterator[str]:
    """Yield the lines of standard input that are not empty."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if on_terminal:
        # lets input() edit its line and remember earlier ones
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ") if on_terminal else input()
        except EOFError:
            if on_terminal:
                print()
            return
        if line.strip():
            yield line


def _remark(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def _speaker_of(chosen: Namespace, short: Mapping[str, str]) -> Iterator[tuple[Speaker, str]]:
    """Yield the model, loaded, and where it is from, in words."""
    is_run = is_run_or_model(chosen.model, chosen.step)
    role = "policy"
    if chosen.role is not None:
        role = chosen.role
    if is_run:
        _check_generates(chosen.model, role)
        Run(chosen.model).checkpoint_step(chosen.step)
    elif chosen.role is not None:
        raise ConfigError(
            f"{chosen.model!r} is a Hugging Face folder, and has no role {chosen.role!r}: leave "
            "out --role"
        )
    config = _config(chosen, short, is_run=is_run)
    shown = redacted(chosen.model)
    if not is_run:
        config.model.path = local_folder(config.model.path, {})
        yield _speaker(chosen, config, are_texts=False), shown
        return
    config = config_of_role(config, role)
    with TemporaryDirectory() as folder:
        write = partial(_write, chosen.model, folder, role)
        step = with_whole_checkpoint(chosen.model, chosen.step, [role], write)
        own = replace(config, model=replace(config.model, path=folder))
        speaker = _speaker(chosen, own, are_texts=_prompts_are_texts(chosen.model, step))
        yield speaker, f"{shown}, step {step}"


def _config(chosen: Namespace, short: Mapping[str, str], *, is_run: bool) -> Config:
    """Return the run's configuration, or the defaults, with the overrides and short options."""
    for text in chosen.overrides:
        if text.partition("=")[0] == "model.path":
            raise ConfigError(f"{text}: chat takes the model as its first argument")
    # one response a prompt, which may be the most likely one
    settings = {"validation.n": 1, "validation.k": [], **short}
    overrides = [*(f"{key}={_spelled(value)}" for key, value in settings.items())]
    if is_run:
        return Run(chosen.model).config_with([*overrides, *chosen.overrides])
    unused = ["data.url=none", f"model.path={json.dumps(chosen.model)}"]
    return load_text("{}", "the defaults", [*unused, *overrides, *chosen.overrides])


def _spelled(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _check_generates(run: str, role: str) -> None:
    """Raise ConfigError for a role that is a critic: its model gives values, and no text."""
    spec = Run(run).dag["roles"].get(role, {})
    if str(spec.get("build", "")).endswith(":build_critic"):
        raise ConfigError(
            f"role {role!r} of run {run!r} is a critic, which gives values and no text: leave out "
            "--role, for the policy"
        )


def _write(run: str, folder: str, role: str, found: Checkpoint) -> None:
    write_folder(Path(folder), run, Run(run).config, found, role=role)


def _prompts_are_texts(run: str, step: int) -> bool:
    """Return whether the prompts that the run has saved of a step are texts; False where it has
    saved none.
    """
    try:
        with open_newest(run, [step]) as rows:
            if rows is None or PROMPT not in rows.schema.names:
                return False
            return bool(pa.types.is_string(rows.schema.field(PROMPT).type))
    except DataError as error:
        _remark(f"whether the run's prompts were texts is not known: {error}")
        return False


def _speaker(chosen: Namespace, config: Config, *, are_texts: bool) -> Speaker:
    # torch and transformers take seconds, for which a refusal need not wait
    from siirl_dask.devices import DeviceKind, accelerator
    from siirl_dask.models.longest_row import check_frequencies_are_pinned
    from siirl_dask.nodes import validation_sampling
    from siirl_dask.rollout.tokenizer import load_tokenizer
    from siirl_dask.rollout.transformers_engine.engine import TransformersEngine

    model = config.model
    key = f"the model of {redacted(chosen.model)!r}"
    tokenizer = load_tokenizer(model.path, key).with_options(model)
    is_chat = tokenizer.has_chat_template
    if are_texts or chosen.raw:
        is_chat = False
    if chosen.system is not None and not is_chat:
        raise ConfigError(
            f"--system {chosen.system!r}: prompts of {chosen.model!r} are texts that it continues, "
            "and have no system message: write it before the prompt"
        )
    check_frequencies_are_pinned(model)
    kind = accelerator.kind_here()
    device = str(kind) if kind is DeviceKind.CPU else f"{kind}:0"
    return Speaker(
        engine=TransformersEngine(model, device=device, max_rows=1),
        tokenizer=tokenizer,
        sampling=validation_sampling(config.rollout, config.validation),
        seed=config.run.seed,
        is_chat=is_chat,
        system=chosen.system,
    )


class ContextFull(ConfigError):
    """The prompt leaves no room for an answer in the model's context."""


@dataclass(slots=True)
class Speaker:
    """A loaded model, and the conversation with it."""

    engine: TransformersEngine
    tokenizer: HuggingFaceTokenizer
    sampling: Sampling
    seed: int
    is_chat: bool
    """Whether prompts are messages for the chat template; else each is a text by itself."""
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: int = 0
    """Answers that were begun: each is drawn with a seed of its own."""

    @property
    def described(self) -> str:
        """How prompts reach the model, in words."""
        if self.is_chat:
            return "prompts are messages for its chat template, and earlier ones are kept"
        return "each prompt is a text that it continues, by itself"

    def begin(self) -> None:
        """Forget what was said."""
        self.messages.clear()

    def answer(self, prompt: str) -> None:
        """Write the answer to standard output as it is drawn, and keep both in a chat.

        Ctrl-C ends the answer, and KeyboardInterrupt is raised where nothing of it was drawn yet.
        ContextFull, and nothing is kept, where there is no room for an answer.
        """
        ids = self._encode(prompt)
        limits = {self.sampling.max_tokens: "--max-tokens"}
        context = self.engine.context_length
        if context is not None:
            limits.setdefault(context - len(ids), f"the model's context of {context}")
        room = min(limits)
        if room < 1:
            raise ContextFull(
                f"the prompt, with what was said before, has {counted(len(ids), 'token')}, and "
                f"the model's context is {context}: there is no room for an answer"
            )
        request = GenerationRequest(
            prompt=ids,
            seed=self.seed + self.answers,
            sampling=replace(self.sampling, max_tokens=room),
        )
        self.answers += 1
        text = StreamedText(self.tokenizer)
        try:
            reason = self.engine.stream(request, text.add).finish_reason
        except KeyboardInterrupt:
            if not text.token_ids:
                raise
            reason = None
        answer = text.end()
        if reason is None:
            _remark("(stopped)")
        elif reason is FinishReason.LENGTH:
            _remark(f"(cut after {counted(room, 'token')}: {limits[room]})")
        if self.is_chat:
            self.messages += [_message("user", prompt), _message("assistant", answer)]

    def _encode(self, prompt: str) -> list[int]:
        if not self.is_chat:
            ids = self.tokenizer.encode(prompt)
        else:
            before = []
            if self.system is not None:
                before = [_message("system", self.system)]
            ids = self.tokenizer.encode([*before, *self.messages, _message("user", prompt)])
        if not ids:
            raise ConfigError(f"the prompt {prompt!r} has no tokens: expected a text")
        return ids


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class StreamedText:
    """Writes the text of tokens to standard output while they come: what a terminal obeys, such
    as escape sequences, is shown there as a replacement character.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._for_terminal = sys.stdout.isatty()
        # tokens from here on are decoded together, since some have a text only beside others
        self._begin = 0
        self._shown = 0
        self.token_ids: list[int] = []

    def add(self, token: int) -> None:
        """Write what a further token adds, once its last character is whole."""
        self.token_ids.append(token)
        before = self._text(self.token_ids[self._begin : self._shown])
        text = self._text(self.token_ids[self._begin :])
        if len(text) <= len(before) or text.endswith(_HELD):
            return
        self._write(text[len(before) :])
        self._begin = self._shown
        self._shown = len(self.token_ids)

    def end(self) -> str:
        """Write what is left, and a line's end. Return the whole text."""
        before = self._text(self.token_ids[self._begin : self._shown])
        self._write(self._text(self.token_ids[self._begin :])[len(before) :] + "\n")
        return self._text(self.token_ids)

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(printable(text) if self._for_terminal else text)
        sys.stdout.flush()
