"""How a worker is reached between hosts, and reaches others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host, parse_address

from siirl_dask.comms.sockets import Scheme
from siirl_dask.dask_internals import certificates_of
from siirl_dask.errors import ConfigError

if TYPE_CHECKING:
    from distributed import Worker

_ANY_PORT = (0,)
_WILDCARDS = ("", "0.0.0.0", "::")  # hosts of a listener at every interface
_SCHEMES = {
    "tcp": Scheme.TCP,
    "tls": Scheme.TLS,
    "ucx": Scheme.UCXX,
    "ucxx": Scheme.UCXX,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkAccess:
    """How a worker is reached between hosts, and reaches others."""

    scheme: Scheme
    host: str
    """Host of the interface that it listens on."""
    wildcard: str | None = None
    """Host to listen on where ``host`` is no address of this machine, as behind NAT: every
    interface. None: there is no other."""
    ports: Iterable[int] = _ANY_PORT
    """Ports to try in turn; 0: any free one."""
    listens_with: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``listen``: the certificates of the cluster."""
    connects_with: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(worker: Worker, ports: Iterable[int] = _ANY_PORT) -> NetworkAccess:
        """Return the network of a Dask worker: the interface that its own listener is bound to,
        which may be another than the address that others contact it at, and its certificates.
        ConfigError for a cluster whose comms have no hosts.

        A plain ``dask worker`` listens at every interface. Rows take the one that others contact
        it at, and every interface only where that is an address of another machine.
        """
        scheme, _ = parse_address(worker.address)
        if scheme not in _SCHEMES:
            raise ConfigError(
                f"worker {worker.name!r} is at {worker.address}: rows travel between hosts, which "
                f"{scheme}:// does not know; start the cluster with protocol tcp, tls or ucx"
            )
        chosen = _SCHEMES[scheme]
        listens_with, connects_with, must_encrypt = certificates_of(worker)
        if chosen is Scheme.UCXX and not has_ucxx():
            # other comms of that name carry Dask's messages, and rows go over tcp next to them
            chosen = Scheme.TCP
        if must_encrypt:
            chosen = Scheme.TLS
        host = get_address_host(worker.listen_address)
        wildcard = None
        if host in _WILDCARDS:
            contact = get_address_host(worker.address)
            wildcard = _wildcard_of(contact)
            # a name is the contact address of one who has named both, and may lead to loopback here
            if wildcard is not None:
                host = contact
        return NetworkAccess(
            scheme=chosen,
            host=host,
            wildcard=wildcard,
            ports=ports,
            listens_with=listens_with,
            connects_with=connects_with,
        )


def has_ucxx() -> bool:
    """Return whether ucxx can be imported here, with the libraries that it needs."""
    try:
        import ucxx  # noqa: F401
    except ImportError:
        return False
    return True


def _wildcard_of(host: str) -> str | None:
    """Return the host of every interface of an address's family; None for a name."""
    try:
        version = ip_address(host).version
    except ValueError:
        return None
    return "::" if version == 6 else "0.0.0.0"
