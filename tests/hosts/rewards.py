"""Rewards that look at the host on which they run."""

import psutil


def nobody_listens_to_the_network(prompt, response, answer):
    """Raise RuntimeError when a process of this host listens at another address than loopback."""
    listeners = [
        peer.laddr.ip for peer in psutil.net_connections("tcp") if peer.status == psutil.CONN_LISTEN
    ]
    if outside := [address for address in listeners if address not in ("127.0.0.1", "::1")]:
        raise RuntimeError(
            f"{len(outside)} of {len(listeners)} listeners are not on loopback: {set(outside)}"
        )
    return float(len(listeners) > 5)
