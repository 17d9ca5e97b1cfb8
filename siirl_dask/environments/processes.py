"""Environments in child processes, each of which holds many and makes one call at a time.

An episode stays with its process. A call that takes too long costs the process, and with it the
other episodes that it held; tools without state may run in any, and cost nobody an episode but in
the same way.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from siirl_dask.environments.answers import WrongAnswer, cut, opening_from, step_from
from siirl_dask.environments.places import CallFailed, guarded
from siirl_dask.environments.protocol import Failure, Step
from siirl_dask.environments.room import Opened, Room, World
from siirl_dask.errors import ConfigError
from siirl_dask.pickling import dumps
from siirl_dask.rewards.child_process import Child, Outcome, connect
from siirl_dask.wording import exception_text

_LONGEST = 32 * 2**20  # bytes of an answer, which holds at most one prompt and one history


class InProcesses:
    """Environments in ``processes`` children. ConfigError for what cannot be sent to them or
    loaded there.
    """

    def __init__(self, world: World, *, processes: int, timeout: float | None) -> None:
        try:
            payload = dumps(world)
        except Exception as error:  # pickle raises anything from TypeError to RecursionError
            raise ConfigError(
                f"the environments cannot be sent to other processes: {error}"
            ) from error
        self._most = world.most
        self._slots = [
            _Slot(payload, timeout, f"siirl-environment-{index}") for index in range(processes)
        ]
        self._held: dict[int, _HeldEpisodes] = {}
        try:
            # One starts now, so that what cannot be loaded is known before the run; the others
            # meanwhile.
            self._slots[0].thread.submit(self._slots[0].start).result()
            for slot in self._slots[1:]:
                slot.thread.submit(slot.start)
        except BaseException:
            self.end()
            raise

    async def open(
        self,
        episode: int,
        name: str,
        row: Mapping[str, Any],
        seed: int,
    ) -> Opened | Failure:
        return await guarded(self._open(episode, name, row, seed))

    async def step(self, episode: int, text: str) -> Step | Failure:
        return await guarded(self._step(episode, text))

    async def use(
        self,
        episode: int | None,
        tool: str,
        arguments: Mapping[str, Any],
    ) -> str | Failure:
        return await guarded(self._use(episode, tool, arguments))

    async def reward(self, episode: int) -> float | Failure:
        return await guarded(self._reward(episode))

    async def close(self, episode: int) -> Failure | None:
        """Have an episode's process close its environment; a process that is gone has none."""
        held = self._held.pop(episode, None)
        if held is None:
            return None
        held.slot.held -= 1
        if not held.there:
            return None
        answer = await guarded(held.slot.ask(("close", episode), held.life))
        if isinstance(answer, Failure):
            return answer
        return None

    def holds(self, episode: int) -> bool:
        """Whether the process that an episode began in is there."""
        return self._held[episode].there

    def abandon(self) -> None:
        """Kill the children that are at work."""
        for slot in self._slots:
            if slot.waiting:
                slot.kill()

    def end(self) -> None:
        """Kill all children, and end the threads that wait for them."""
        for slot in self._slots:
            slot.end()

    async def _open(self, episode: int, name: str, row: Mapping[str, Any], seed: int) -> Opened:
        slot = min(self._slots, key=lambda slot: slot.held)
        slot.held += 1
        held = self._held[episode] = _HeldEpisodes(slot)
        plain = await slot.begin(("reset", episode, name, dict(row), seed), held)
        if not isinstance(plain, dict) or not isinstance(plain.get("tools"), list):
            raise WrongAnswer(f"the process gave {plain!r:.200}: expected an opening")
        return Opened(
            opening_from(plain.get("opening")),
            tools=plain["tools"],
            takes_text=bool(plain.get("takes_text")),
            gives_reward=bool(plain.get("gives_reward")),
        )

    async def _step(self, episode: int, text: str) -> Step:
        return step_from(await self._ask("step", episode, text), most=self._most)

    async def _use(self, episode: int | None, tool: str, arguments: Mapping[str, Any]) -> str:
        if episode is None:
            free = min(self._slots, key=lambda slot: (slot.waiting, slot.held))
            result = await free.begin(("use", None, tool, dict(arguments)))
        else:
            result = await self._ask("use", episode, tool, dict(arguments))
        if not isinstance(result, str):
            raise WrongAnswer(f"the process gave {result!r:.200}: expected a text")
        return cut(result, self._most)

    async def _reward(self, episode: int) -> float:
        reward = step_from({"reward": await self._ask("reward", episode)}, most=self._most).reward
        assert isinstance(reward, float)
        return reward

    async def _ask(self, name: str, episode: int, *arguments: Any) -> Any:
        held = self._held[episode]
        return await held.slot.ask((name, episode, *arguments), held.life)


@dataclass(slots=True)
class _HeldEpisodes:
    """The place of an episode's environment."""

    slot: _Slot
    life: int = 0
    """Number of the child that has it; 0: none yet."""

    @property
    def there(self) -> bool:
        """Whether that child is alive."""
        if self.slot.life != self.life:
            return False
        return self.slot.alive


class _Slot:
    """One child at a time, and the thread that made it and asks it. Attributes belong to the
    event loop.
    """

    def __init__(self, payload: bytes, timeout: float | None, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, name)
        self.held = 0  # episodes
        self.waiting = 0  # calls
        self.life = 0  # number of the child
        self._payload = payload
        self._timeout = timeout
        self._child: Child | None = None
        self._end = ""  # how the last child came to its end

    @property
    def alive(self) -> bool:
        """Whether there is a child that was not killed."""
        if self._child is None:
            return False
        return self._child.alive

    async def begin(self, request: tuple[Any, ...], held: _HeldEpisodes | None = None) -> Any:
        """Return the result of a request that any child may have; ``held`` is told the number of
        the one that has.
        """
        return await self._run(partial(self._begin, request, held))

    async def ask(self, request: tuple[Any, ...], life: int) -> Any:
        """Return the result of a request to the child of that number. CallFailed if it is gone."""
        return await self._run(partial(self._ask, request, life))

    def start(self) -> None:
        """Start a child, in the slot's thread. ConfigError if it cannot load the environments."""
        self._child = Child(serve, self._payload, what="the environments", longest=_LONGEST)
        self.life += 1

    def kill(self) -> None:
        """Kill the child. Any thread may call it."""
        child = self._child
        if child is not None:
            child.kill()

    def end(self) -> None:
        """Kill the child, and end the thread."""
        self.kill()
        self.thread.shutdown(cancel_futures=True)
        if self._child is not None:
            self._child.close()

    async def _run(self, call: Callable[[], Outcome]) -> Any:
        self.waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self.thread, call)
        try:
            result, failure = await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
        finally:
            self.waiting -= 1
        if failure is not None:
            raise CallFailed(failure)
        return result

    def _begin(self, request: tuple[Any, ...], held: _HeldEpisodes | None) -> Outcome:
        if not self.alive:
            try:
                self.start()
            except ConfigError as error:
                return None, str(error)
        if held is not None:
            held.life = self.life
        return self._call(request)

    def _ask(self, request: tuple[Any, ...], life: int) -> Outcome:
        if self.life != life or not self.alive:
            return (
                None,
                "was lost with the process that held it, in a call of another episode: "
                f"{self._end}",
            )
        return self._call(request)

    def _call(self, request: tuple[Any, ...]) -> Outcome:
        assert self._child is not None
        result, failure = self._child.call(request, self._timeout)
        if not self._child.alive:
            self._end = failure if failure else "it was killed"
        return result, failure


def serve(file: int) -> None:
    """Run a child: load the environments, then answer one call after the other until the parent
    is gone.
    """
    requests = connect(file)
    world = requests.load(_prepare)
    if world is None:
        return
    room = Room(world, _call)
    calls: Mapping[str, Callable[..., Any]] = {
        "reset": room.reset,
        "step": room.step,
        "use": room.use,
        "reward": room.reward,
        "close": room.close,
    }
    with asyncio.Runner() as runner:
        for name, *arguments in requests:
            answer = runner.run(guarded(calls[name](*arguments)))
            if name == "reset" and isinstance(answer, Failure):
                runner.run(guarded(room.close(arguments[0])))
            reply: tuple[Any, str | None] = (answer, None)
            if isinstance(answer, Failure):
                reply = (None, answer.reason)
            requests.answer(_as_json(reply))


def _prepare(world: World) -> None:
    """Import what takes seconds, and is needed where a factory is no class, before the first
    call with its limit.
    """
    if world.environments.keys() - world.schemas.keys():
        from siirl_dask.models.broken_imports import hide

        hide()
        import transformers.utils.chat_template_utils  # noqa: F401


async def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        result = function(*arguments, **named)
        if inspect.isawaitable(result):
            return await result
        return result
    except (
        SystemExit,
        KeyboardInterrupt,
        asyncio.CancelledError,
    ) as error:  # these would end the process
        raise CallFailed(exception_text(error)) from error


def _as_json(outcome: tuple[Any, str | None]) -> bytes:
    answer, failure = outcome
    plain = answer
    if isinstance(answer, (Opened, Step)):
        plain = asdict(answer)
    frame = json.dumps((plain, failure)).encode()
    if len(frame) > _LONGEST:
        return json.dumps((None, f"gave {len(frame)} bytes: expected at most {_LONGEST}")).encode()
    return frame
