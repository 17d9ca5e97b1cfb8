"""Proofs by which each side of a connection shows the other that it knows a secret.

Both sides send a random nonce in Dask's handshake. A proof is the HMAC-SHA256 (RFC 2104) of the
side and both nonces under the secret: it is good for one side of one connection, and shows nothing
of the secret. The listener proves nothing before it has checked the other side's proof.

Whoever can change packets on the way can still pass the messages of two peers on, and change those
that follow: TLS is there against that.
"""

from __future__ import annotations

import hmac
from enum import StrEnum
from secrets import token_bytes

NONCE_BYTES = 32
_SECRET_BYTES = 32


class Side(StrEnum):
    """The sides of a connection."""

    ASKS = "asks"
    """The side that has connected."""
    ANSWERS = "answers"
    """The side that listens."""

    @property
    def other(self) -> Side:
        return Side.ANSWERS if self is Side.ASKS else Side.ASKS


def new_secret() -> bytes:
    """Return a random secret of 256 bits."""
    return token_bytes(_SECRET_BYTES)


def new_nonce() -> bytes:
    return token_bytes(NONCE_BYTES)


def proof_of(secret: bytes, side: Side, asker_nonce: bytes, listener_nonce: bytes) -> bytes:
    """Return the proof of one side, 32 bytes. Nonces are of ``NONCE_BYTES`` each."""
    message = f"siirl_dask {side} ".encode() + asker_nonce + listener_nonce
    return hmac.digest(secret, message, "sha256")
