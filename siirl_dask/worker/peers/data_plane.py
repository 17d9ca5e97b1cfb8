"""A worker's part of the data plane: its databuffer, and the transport that connects it to its
peers.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.comm.addressing import get_address_host

from siirl_dask.comms.access import NetworkAccess
from siirl_dask.config import Config, TransportMode, WeightSync, parse_bytes, parse_ports
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.coordinator.databuffer.serving import Window
from siirl_dask.coordinator.transport.carriers import HostCarrier, NetworkCarrier
from siirl_dask.coordinator.transport.messages import Handler, Op, Reply, Request
from siirl_dask.coordinator.transport.peers import Carrier, PeerTransport
from siirl_dask.errors import ConfigError, PeerError, PeerGone, SilentPeer
from siirl_dask.planner import Edge, Hosts
from siirl_dask.trace import Lane, Recorder

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("siirl_dask.worker")
_M_TRIM_THRESHOLD = -1  # of mallopt(3)
_M_MMAP_THRESHOLD = -3
_PEER_TIMEOUT_ON_HOST = 5.0  # seconds
_PEER_TIMEOUT_OF_LINKS = 15.0  # a link may fail and recover, a process does not
_MAX_MMAP_THRESHOLD = 32 * 2**20  # bytes: the largest value that glibc accepts for M_MMAP_THRESHOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Settings for moving rows between workers."""

    transport: TransportMode = TransportMode.auto
    """``data.transport``."""
    limits: BufferLimits = field(default_factory=BufferLimits)
    ports: Sequence[int] = (0,)
    """Ports to try in turn for the worker's listener; 0: any free one."""
    prefetch: bool | None = None
    """``data.prefetch``."""
    quadratic_from: int = 0
    """Tokens at which attention costs a row as much as everything else; 0 balances rows by
    tokens alone."""
    peer_timeout: float = _PEER_TIMEOUT_ON_HOST
    """Seconds without a sign of life after which a peer counts as dead."""
    stall_timeout: float = 600.0
    """Seconds without progress on any worker after which the run ends."""
    stealing: bool = True
    """Workers may take over work from one another."""
    stream_bytes: int = 2**28
    """Largest table of a weight stream, unless one parameter is larger."""
    weight_sync: WeightSync = WeightSync.rows
    ahead: int = 16
    """Iterations that may be submitted beyond the first that some worker has not completed."""

    @staticmethod
    def of(config: Config, addresses: Collection[str]) -> DataSettings:
        """Return the settings in ``config``, for workers at Dask addresses such as ``tcp://10.0.0.1:41``."""
        data = config.data
        hosts = {get_address_host(address) for address in addresses}
        peer_timeout = config.cluster.peer_timeout
        if not peer_timeout:
            peer_timeout = _PEER_TIMEOUT_ON_HOST if len(hosts) == 1 else _PEER_TIMEOUT_OF_LINKS
        return DataSettings(
            transport=data.transport,
            limits=BufferLimits(
                memory=parse_bytes("data.memory_limit", data.memory_limit),
                spill_folder=data.spill_directory,
            ),
            ports=(0,) if data.port is None else parse_ports("data.port", data.port),
            prefetch=data.prefetch,
            quadratic_from=data.quadratic_from,
            peer_timeout=peer_timeout,
            stall_timeout=config.cluster.stall_timeout,
            stealing=config.rollout.work_stealing is not False,
            stream_bytes=parse_bytes("rollout.weight_bucket", config.rollout.weight_bucket),
            weight_sync=config.rollout.weight_sync,
            ahead=config.run.lookahead + (config.rollout.steps_ahead or 0),
        )


class DataPlane:
    """Starts, serves and closes a worker's databuffer and transport, on the Dask worker's event
    loop.
    """

    def __init__(
        self,
        worker: Worker,
        run: str,
        members: Mapping[str, str],
        edges: Mapping[str, Edge],
        settings: DataSettings,
        hosts: Hosts | None = None,
        trace: Recorder | None = None,
        *,
        secret: bytes,
    ) -> None:
        """``secret`` is the run's: who does not know it is no member."""
        self.port = 0
        """Port of this worker's listener, once it has started."""
        self.window = Window(settings.ahead)
        self._worker = worker
        self._run = run
        self._limits = settings.limits
        self._trace = Recorder(enabled=False) if trace is None else trace
        network = NetworkAccess.of(worker, settings.ports)
        timeout = settings.peer_timeout
        self._network = NetworkCarrier(run, members, self._answer, network, timeout, secret=secret)
        self._on_host: HostCarrier | None = None
        carriers: list[Carrier] = [self._network]
        if settings.transport is not TransportMode.dask:
            self._on_host = HostCarrier(
                run, str(worker.name), members, self._answer, timeout, secret=secret
            )
            carriers.insert(0, self._on_host)
        self.transport = PeerTransport(run, members, carriers, settings.peer_timeout)
        self.databuffer = Databuffer(
            run,
            str(worker.name),
            edges,
            self.transport,
            transport_mode=settings.transport,
            limits=settings.limits,
            quadratic_from=settings.quadratic_from,
            hosts=hosts,
            prefetch=settings.prefetch,
            window=self.window,
        )
        self._handler: Handler = self.databuffer.handle

    async def start(self, handler: Handler | None = None) -> None:
        """Begin to answer peers, with ``handler`` or with the databuffer's own."""
        if handler is not None:
            self._handler = handler
        _keep_freed_memory(self._limits.memory // 8)
        self.port = await self._network.start()
        if self._on_host is not None:
            await self._on_host.start()
        await self.transport.start()

    def meet(self, ports: Mapping[str, int]) -> None:
        """Set the port of every member's listener; requests to peers are possible from then on."""
        self._network.meet(ports)
        if self._on_host is not None:
            self._on_host.meet()

    def begin(self, sequence: int, needed: int) -> None:
        """Begin the iteration ``sequence``, and forget the rows of those before sequence number
        ``needed``.
        """
        self.window.begin(sequence)
        self.databuffer.forget(needed)

    async def _answer(self, request: Request) -> Reply:
        if request.op == Op.PING:
            return Reply()
        started = time.monotonic_ns()
        try:
            reply = await self._handler(request)
        except (PeerGone, SilentPeer):
            raise  # whom this worker had to ask first; the driver names the worker that was lost
        except PeerError as error:
            logger.warning("refused a request of run %s: %s", self._run, error)
            raise
        self._record(request, reply, started)
        return reply

    def _record(self, request: Request, reply: Reply, started: int) -> None:
        """Record rows that a peer was sent; early ones when they leave, since their request
        waits for them.
        """
        if request.op not in (Op.FETCH, Op.EARLY):
            return
        early = request.op == Op.EARLY
        edge = next(
            (part for part in request.key.edge.split("/") if "->" in part), request.key.edge
        )
        nbytes = reply.nbytes
        written = reply.header.get("written", 0)
        if isinstance(written, int):
            nbytes += written
        self._trace.add(
            Lane.TRANSFER,
            what="send early" if early else "send",
            name=edge,
            start=time.monotonic_ns() if early else started,
            amount=nbytes,
            sequence=request.key.sequence,
        )

    def check(self) -> None:
        """Raise ConfigError if this machine lacks the spill folder that the settings name."""
        folder = self._limits.spill_folder
        if folder and not Path(folder).is_dir():
            raise ConfigError(
                f"data.spill_directory={folder!r}: worker {self._worker.name!r} has no such folder"
            )

    async def close(self) -> None:
        """Stop answering peers and free all rows."""
        self.databuffer.close()
        await self.transport.close()


def _keep_freed_memory(nbytes: int) -> None:
    """Make glibc reuse up to ``nbytes`` of freed memory for the next messages.

    Dask's nanny makes it return freed memory to the system at once, and every message would fault
    its pages in again.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
            libc.mallopt(_M_TRIM_THRESHOLD, min(nbytes, 2**31 - 1))
