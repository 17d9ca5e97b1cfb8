"""Comms of Dask that carry rows: ``rows+tcp``, ``rows+tls``, ``rows+ucxx`` and ``rows+unix``.

They are backends of ``distributed.comm``, under the names above, so Dask's ``connect``, ``listen``,
``rpc`` and ``ConnectionPool`` work on them. What differs from Dask's own comms:

* a message is plain data and raw frames (``wire``): no byte of it is unpickled, in the handshake
  neither, and every size is bounded before memory is taken for it;
* frames are sent from where they lie and received into their places (``RowsComm.send`` and
  ``RowsComm.receive``), without a copy in this process;
* a listener gives a connection seconds to say who it is, and to prove that it knows a secret where
  the listener has one (``RowsComm.authenticate``).

Over UCX (``rows+ucxx``) the receiver copies once, and the first bound is UCX's to keep, which keeps
none: see docs/dataplane.md.

A whole cluster cannot speak them: Dask's control messages are pickles.
"""

__all__ = ["access", "backends", "proofs", "rows_comm", "sockets", "wire"]
