"""Makes an Opening or a Step of whatever an environment returns, the same in the worker as in
another process.

Whatever comes out is plain: texts without lone surrogates and of bounded length, finite numbers,
messages as JSON has them. ``gives`` in an error completes "its reset ..." or "its step ...".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from siirl_dask.environments.pictures import Parts, is_parts, with_urls, without_images
from siirl_dask.environments.protocol import Failure, Opening, Step, Text
from siirl_dask.errors import ImageError, UserError
from siirl_dask.wording import bounded, without_addresses

_LARGEST = 3.4028234663852886e38  # the largest float32, the type of a reward's column
_LONGEST_HISTORY = 8 * 2**20  # bytes of a prompt or a history, which are never cut
_BESIDE_CONTENT = 1000  # bytes of a message besides its content
_GYM_STEP = 5  # observation, reward, terminated, truncated, info
_SKYRL_STEP = {"observations", "reward", "done"}


class WrongAnswer(UserError):
    """An environment returned something that is no opening and no step."""


class Refused(UserError):
    """An environment returned a Failure; the text is its reason."""


def cut(text: str, most: int) -> str:
    """Return a text of at most ``most`` bytes of UTF-8: the beginning, and a word that says how
    much it was.
    """
    whole = text.encode("utf-8", "replace")
    if len(whole) <= most:
        return whole.decode()
    word = f" [cut: {len(whole)} bytes]"
    return whole[: max(0, most - len(word))].decode("utf-8", "ignore") + word


def opening_of(answer: object, prompt: object = None, *, most: int) -> Opening:
    """Return the opening that a ``reset`` returned. ``prompt`` is the row's own, which gymnasium's
    observations follow.

    Refused for a Failure, WrongAnswer for something else.
    """
    _check_failure(answer)
    # gymnasium's and skyrl-gym's
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        first = answer[0]
        if is_parts(first):
            first = after(prompt, first)
        elif not _is_chat(first):
            first = after(prompt, cut(text_of(first), most))
        answer = first
    if not isinstance(answer, Opening):
        answer = Opening(prompt=_text(answer, "reset gave"))  # type: ignore[arg-type]  # _text refuses others
    tools = [_plain(tool, "reset gave tools") for tool in answer.tools]
    return Opening(
        prompt=_whole(answer.prompt, "reset gave"),
        tools=tools,
        agent=_name(answer.agent),
    )


def _is_chat(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(item, Mapping) for item in value)


def step_of(answer: object, *, most: int) -> Step:
    """Return the step that a ``step`` returned, its observation cut to ``most`` bytes.

    Refused for a Failure, WrongAnswer for something else.
    """
    _check_failure(answer)
    if isinstance(answer, tuple) and len(answer) == _GYM_STEP:
        observation, reward, terminated, truncated, _ = answer
        heard = _text(observation, "step gave") if is_parts(observation) else text_of(observation)
        answer = Step(observation=heard, reward=reward, done=bool(terminated or truncated))  # type: ignore[arg-type]
    elif isinstance(answer, Mapping) and answer.keys() >= _SKYRL_STEP:
        observations = None
        if answer["observations"]:
            observations = answer["observations"]
        answer = Step(observation=observations, reward=answer["reward"], done=answer["done"])
    elif not isinstance(answer, Step):
        answer = Step(observation=_text(answer, "step gave"))  # type: ignore[arg-type]
    reward = answer.reward
    return Step(
        observation=_short(answer.observation, most),
        reward=_numbers(reward, "reward")
        if isinstance(reward, Mapping)
        else _number(reward, "reward"),
        done=_flag(answer.done),
        state=state_of(answer.state),
        history=_whole(answer.history, "step gave the history"),
        agent=_name(answer.agent),
        parts=_numbers(answer.parts, "part"),
    )


def _check_failure(answer: object) -> None:
    if isinstance(answer, Failure):
        raise Refused(bounded(str(answer.reason)))


def state_of(state: object) -> str | None:
    """Return a text that equal states share in every process; None for none.

    WrongAnswer for a state that is not made of texts, numbers, and tuples, lists, sets or mappings
    of these.
    """
    if state is None:
        return None
    return json.dumps(_canonical(state), sort_keys=True)


def after(prompt: object, text: str | Parts) -> Text:
    """Return a prompt with a text, or with texts and images, after it: at the end of its last
    message where it is a chat. WrongAnswer for images after a string.
    """
    if isinstance(prompt, str) and not isinstance(text, str):
        raise WrongAnswer(
            "gave an image, and the prompt is a string: expected messages, for the model's chat "
            "template"
        )
    if isinstance(prompt, str):
        return prompt + str(text)
    if not isinstance(prompt, Sequence) or not prompt:
        if isinstance(text, str):
            return text
        return [{"role": "user", "content": [*text]}]
    *before, last = prompt
    content = last.get("content")
    if isinstance(text, str) and not isinstance(content, list):
        return [*before, {**last, "content": (content or "") + text}]
    parts: list[Any] = []
    if isinstance(content, list):
        parts.extend(content)
    elif content:
        parts.append({"type": "text", "text": content})
    if isinstance(text, str):
        parts.append({"type": "text", "text": text})
    else:
        parts.extend(text)
    return [*before, {**last, "content": parts}]


def text_of(value: object) -> str:
    """Return an observation or a tool's result as a text: JSON where it is none. WrongAnswer
    where it has no JSON.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=_listed, ensure_ascii=False, allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        shown = without_addresses(f"{value!r:.200}")
        raise WrongAnswer(f"gave {shown}, which is no text and has no JSON: {error}") from error


def opening_from(plain: object) -> Opening:
    """Return the opening that another process sent. WrongAnswer for anything but an opening."""
    return opening_of(_made(Opening, plain), most=_LONGEST_HISTORY)


def step_from(plain: object, *, most: int) -> Step:
    """Return the step that another process sent. WrongAnswer for anything but a step."""
    step: Step = _made(Step, plain)
    state = step.state  # a text already, whose text would be another
    if state is not None and not isinstance(state, str):
        raise WrongAnswer(f"gave the state {state!r:.200}: expected a text")
    return replace(step_of(replace(step, state=None), most=most), state=state)


def _made(kind: type[Any], plain: object) -> Any:
    try:
        return kind(**plain)  # type: ignore[arg-type]
    except TypeError as error:
        raise WrongAnswer(f"gave {plain!r:.200}: expected the fields of {kind.__name__}") from error


def _listed(value: Any) -> Any:
    """Return the plain form of NumPy's values and of sets, which JSON does not know."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", "replace")
    if callable(listed := getattr(value, "tolist", None)):
        return listed()
    raise TypeError(f"a value of type {type(value).__name__}")


def _text(value: object, gives: str) -> object:
    """Return a text or messages, or None, as they are; parts of a content are a user's message.
    WrongAnswer for others.
    """
    if is_parts(value):
        return [{"role": "user", "content": [*value]}]
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        return value
    shown = without_addresses(f"{value!r:.200}")
    raise WrongAnswer(f"{gives} {shown}: expected a text, chat messages or None")


def _whole(value: object, gives: str) -> Text | None:
    """Return a text, or messages with a role and plain content, uncut. WrongAnswer for others,
    and too long ones.
    """
    value = _text(value, gives)
    clean: Text | None
    if value is None or isinstance(value, str):
        clean = None
        if value is not None:
            clean = value.encode("utf-8", "replace").decode()
    else:
        clean = [_message(message, gives) for message in value]  # type: ignore[attr-defined]
    if clean is not None and (size := _size(clean)) > _LONGEST_HISTORY:
        raise WrongAnswer(f"{gives} {size} bytes: expected at most {_LONGEST_HISTORY}")
    return clean


def _short(value: object, most: int) -> Text | None:
    """Return an observation of at most ``most`` bytes: later messages are cut first."""
    value = _text(value, "step gave")
    if value is None or isinstance(value, str):
        if value is None:
            return None
        return cut(value, most)
    messages = []
    left = most
    for given in value:  # type: ignore[attr-defined]
        message = given
        if isinstance(content := given.get("content"), str):
            message = {**given, "content": cut(content, max(left, 0))}
            left -= len(content.encode("utf-8", "replace"))
        messages.append(_message(message, "step gave"))
    size = _size(messages)
    if size > 2 * most + _BESIDE_CONTENT * len(messages) + 2**16:
        raise WrongAnswer(
            f"step gave messages of {size} bytes beside their texts: expected at most about {most}"
        )
    return messages


def _size(text: Text) -> int:
    """Return the size of a text or messages in bytes; images have a limit of their own."""
    return len(json.dumps(text if isinstance(text, str) else without_images(text)))


def _message(message: Any, gives: str) -> dict[str, Any]:
    if is_parts(content := message.get("content")):
        try:
            message = {**message, "content": with_urls(content)}
        except ImageError as error:
            raise WrongAnswer(f"{gives} a message in which {error}") from error
    plain = _plain(message, gives)
    if not isinstance(plain.get("role"), str) or "content" not in plain:
        shown = without_addresses(f"{message!r:.200}")
        raise WrongAnswer(f"{gives} the message {shown}: expected a role and content")
    return plain


def _plain(value: Any, gives: str) -> dict[str, Any]:
    try:
        text = json.dumps(value, default=_listed, ensure_ascii=False).encode("utf-8", "replace")
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongAnswer(f"{gives} {type(value).__name__}, which has no JSON: {error}") from error
    if not isinstance(plain, dict):
        raise WrongAnswer(f"{gives} {plain!r:.200}: expected a mapping")
    return plain


def _canonical(state: object) -> object:
    match state:
        case None | bool() | int() | float() | str():
            return state
        case bytes():
            return ["bytes", state.hex()]
        case tuple() | list():
            return [_canonical(item) for item in state]
        case set() | frozenset():
            return sorted(json.dumps(_canonical(item), sort_keys=True) for item in state)
        case Mapping():
            return {json.dumps(_canonical(key)): _canonical(item) for key, item in state.items()}
    tolist = getattr(state, "tolist", None)  # of numpy's and torch's arrays
    if callable(tolist):
        return _canonical(tolist())
    raise WrongAnswer(
        f"gave the state {without_addresses(f'{state!r:.200}')}: expected texts, numbers, and "
        "tuples, lists, sets or mappings of these"
    )


def _number(value: object, kind: str) -> float:
    if callable(item := getattr(value, "item", None)):  # of NumPy or torch
        value = item()
    if not isinstance(value, Real) or not abs(value) <= _LARGEST:  # type: ignore[operator]
        raise WrongAnswer(
            f"gave the {kind} {without_addresses(f'{value!r:.200}')}: expected a finite number"
        )
    return float(value)


def _numbers(values: object, kind: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise WrongAnswer(
            f"gave {kind}s {without_addresses(f'{values!r:.200}')}: expected numbers by name"
        )
    return {str(name): _number(value, f"{kind} {name!r}") for name, value in values.items()}


def _flag(value: object) -> bool:
    if callable(item := getattr(value, "item", None)):
        value = item()
    if not isinstance(value, bool):
        raise WrongAnswer(
            f"gave done={without_addresses(f'{value!r:.200}')}: expected True or False"
        )
    return value


def _name(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise WrongAnswer(f"gave the agent {without_addresses(f'{value!r:.200}')}: expected a name")
    return value
