"""The resource of a role that has environments: builds their place on a worker, and gives a
session for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from siirl_dask.config import EnvironmentsConfig, ModelConfig, OnToolError, parse_bytes
from siirl_dask.context import Device, HoldsNoGroups, Rank
from siirl_dask.environments.event_loop import EventLoop
from siirl_dask.environments.mcp_servers import McpServers, check_installed
from siirl_dask.environments.places import EnvironmentHost, InWorker
from siirl_dask.environments.processes import InProcesses
from siirl_dask.environments.protocol import OnAnswer, Session, ToolCalls
from siirl_dask.environments.room import ONLY, World, refuse_blocking
from siirl_dask.environments.session import SessionRules, WorkerSession
from siirl_dask.environments.shapes import UnknownShape, is_async, shape_of
from siirl_dask.environments.tools import CallParser, Schema, schema_of, schemas_by_name
from siirl_dask.errors import ConfigError
from siirl_dask.models.cache import local_model
from siirl_dask.planner import RoleCost, bare, builds

Factory = Callable[..., Any]
"""A class of environments, or a function that makes one; see docs/environments.md."""


class WorkerEnvironments(HoldsNoGroups):
    """The environments of one worker: their event loop, their processes or threads, the servers
    of their tools.
    """

    def __init__(
        self,
        world: World,
        config: EnvironmentsConfig,
        device: Device,
        parser: CallParser,
    ) -> None:
        self._config = config
        own: list[Schema] = [schema_of(tool) for tool in world.tools.values()]
        self._loop = EventLoop("siirl-environments", device.bind)
        self._servers: McpServers | None = None
        self._place: EnvironmentHost | None = None
        self._lasting: Session | None = None
        try:
            self._place = _place(world, config, self._loop)
            if config.mcp_servers:
                self._servers = McpServers(
                    config.mcp_servers, self._loop, timeout=config.timeout, most=world.most
                )
            remote = self._servers
            self._rules = SessionRules(
                place=self._place,
                names=list(world.environments),
                name_column=config.name_column,
                columns=config.columns,
                tools=schemas_by_name([*own, *(remote.tools if remote else ())]),
                remote=remote.calls if remote else {},
                parser=parser,
                max_open=config.max_open,
                errors_are_text=config.on_tool_error is OnToolError.text,
                most=world.most,
                progress=device.progress,
            )
        except BaseException:
            self.close()
            raise

    @property
    def max_failures(self) -> int:
        """Episodes of a step, over all workers, that may fail."""
        return self._config.max_failures

    @property
    def max_failed_calls(self) -> float | None:
        """Share of a step's calls of tools, over all workers, that may fail; None: all."""
        return self._config.max_failed_calls

    def take_tool_calls(self) -> ToolCalls:
        """Return the calls of tools on this worker since this was called last."""
        return self._rules.tally.take()

    @property
    def columns(self) -> Sequence[str]:
        """Columns of a row that a session is given."""
        return self._config.row_columns

    def session(self, on_answer: OnAnswer) -> Session:
        """Return a session whose answers go to ``on_answer``, in the thread of the event loop."""
        return WorkerSession(self._rules, self._loop, on_answer)

    def lasting_session(self, on_answer: OnAnswer) -> Session:
        """Return a session that was entered, for several steps. One that there was is left: its
        step was given up.
        """
        self._leave_lasting()
        self._lasting = self.session(on_answer)
        return self._lasting.__enter__()

    def _leave_lasting(self) -> None:
        lasting = self._lasting
        self._lasting = None
        if lasting is not None:
            lasting.__exit__(None, None, None)

    def close(self) -> None:
        """Leave a session that lasts, and end the processes and threads, and the servers of
        tools.
        """
        with ExitStack() as ends:  # all of them, whichever fails
            ends.callback(self._loop.end)
            if self._servers is not None:
                ends.callback(self._servers.end)
            if self._place is not None:
                ends.callback(self._place.end)
            self._leave_lasting()


def _place(world: World, config: EnvironmentsConfig, loop: EventLoop) -> EnvironmentHost:
    if config.processes:
        return InProcesses(world, processes=config.processes, timeout=config.timeout)
    return InWorker(world, timeout=config.timeout, concurrency=config.concurrency)


def _world(options: Mapping[str, Any]) -> World:
    """Return the environments and tools that a builder's options name. ConfigError where there
    are none.
    """
    config: EnvironmentsConfig = options["environments"]
    environment = options.get("environment")
    functions = options.get("tools")
    if functions is None:
        functions = ()
    tools = {_name(function): function for function in functions}
    if len(tools) < len(functions):
        raise ConfigError(
            f"environments.tools={config.tools}: two tools have the same name: rename one of them"
        )
    environments: dict[str, Any] = {ONLY: environment}
    if environment is None:
        environments = dict(options.get("by_name") or ())
    if not environments and not tools and not config.mcp_servers:
        raise ConfigError(
            "environments.environment, environments.by_name, environments.tools and "
            "environments.mcp_servers are "
            "empty: expected one of them, as in environments.environment=mine.py:Guess"
        )
    schemas = {
        name: _schemas(kind)
        for name, kind in map(_class_of, environments.items())
        if kind is not None
    }
    most = parse_bytes("environments.max_observation", config.max_observation)
    return World(environments, tools, most, schemas)


def _class_of(named: tuple[str, Factory]) -> tuple[str, type | None]:
    """Return the class of environments that a factory makes, as far as that is known."""
    name, factory = named
    kind = bare(factory)
    return name, kind if isinstance(kind, type) else None


def _schemas(kind: type) -> Sequence[Schema]:
    """Return the schemas of a class's own tools. ConfigError for a class that is no environment."""
    try:
        schemas = [schema_of(tool) for tool in shape_of(kind).tools.values()]
    except UnknownShape as error:
        raise ConfigError(str(error)) from error
    schemas_by_name(schemas)
    return schemas


def _name(tool: Callable[..., Any]) -> str:
    return str(getattr(bare(tool), "__name__", repr(tool)))


def check_environments(
    options: Mapping[str, Any], workers: Sequence[str], config: object
) -> RoleCost:
    """Refuse what cannot work, before anything starts; environments take no memory that is known.

    Of a factory that is no class only its environments tell what they are, on the workers.
    """
    world = _world(options)
    given = options["environments"]
    check_installed(given.mcp_servers)
    schemas_by_name([schema_of(tool) for tool in world.tools.values()])
    if given.timeout is None or given.processes:
        return RoleCost(memory=0)
    for name, tool in world.tools.items():
        if not is_async(tool):
            raise ConfigError(
                f"environments.timeout={given.timeout:g} needs environments.processes of at least "
                f"1: the tool {name!r} "
                "is not async, and a function in the worker itself cannot be stopped"
            )
    for _, kind in map(_class_of, world.environments.items()):
        if kind is not None:
            try:
                refuse_blocking(kind.__qualname__, shape_of(kind))
            except UnknownShape as error:
                raise ConfigError(str(error)) from error
    return RoleCost(memory=0)


@builds(preflight=check_environments)
def build_environments(
    device: Device,
    rank: Rank,
    *,
    environments: EnvironmentsConfig,
    environment: Factory | None = None,
    by_name: Mapping[str, Factory] | None = None,
    tools: Sequence[Factory] = (),
    model: ModelConfig | None = None,
) -> WorkerEnvironments:
    """Return the environments of a role on one worker.

    ``environment`` is the class or factory of all rows, or ``by_name`` those of which a column
    chooses. ``tools`` are functions that the model may call. ``model`` is the one that calls: its
    tokenizer knows the form of calls. ConfigError for what cannot be loaded.
    """
    options = {
        "environments": environments,
        "environment": environment,
        "by_name": by_name,
        "tools": tools,
    }
    world = _world(options)
    with device.stage("the start of environments"):
        parser = CallParser(_tokenizer(model, device), None if model is None else model.template)
        return WorkerEnvironments(world, environments, device, parser)


def _tokenizer(model: ModelConfig | None, device: Device) -> Any:
    if model is None:
        return None
    from transformers import AutoTokenizer

    path = local_model(model, device).path
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
