"""A program: plain TCP streams from one host to another, the rate that a data plane between them is
held against.

python benchmarks/raw_streams.py serve 198.51.100.2:7777
python benchmarks/raw_streams.py send 198.51.100.2:7777

The sender opens its connections once, and takes lines ``STREAMS BYTES`` from standard input. It
sends so many bytes over so many streams at once and prints the seconds from the first byte until
the receiver says that it has the last.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

STREAMS = 8
_BUFFER = 2**22
_SIZE = struct.Struct("<q")
_DONE = b"."


def serve(host: str, port: int) -> None:
    """Receive from one sender until it closes."""
    with socket.create_server((host, port)) as server, ThreadPoolExecutor(STREAMS) as threads:
        print(json.dumps({"ready": True}), flush=True)
        for _ in range(STREAMS):
            threads.submit(_receive, server.accept()[0])


def send(host: str, port: int) -> None:
    """Send as the lines of standard input say."""
    connections = [socket.create_connection((host, port)) for _ in range(STREAMS)]
    data = memoryview(bytes(_BUFFER))
    print(json.dumps({"ready": True}), flush=True)
    with ThreadPoolExecutor(STREAMS) as threads:
        for line in sys.stdin:
            streams, size = map(int, line.split())
            start = time.perf_counter()
            list(threads.map(lambda c, n=size // streams: _send(c, data, n), connections[:streams]))
            print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


def _send(connection: socket.socket, data: memoryview, size: int) -> None:
    connection.sendall(_SIZE.pack(size))
    for sent in range(0, size, _BUFFER):
        connection.sendall(data[: min(_BUFFER, size - sent)])
    if connection.recv(1) != _DONE:
        raise ConnectionError("the receiver is gone")


def _receive(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(_BUFFER))
    while word := connection.recv(_SIZE.size, socket.MSG_WAITALL):
        (missing,) = _SIZE.unpack(word)
        while missing and (count := connection.recv_into(buffer[: min(_BUFFER, missing)])):
            missing -= count
        connection.sendall(_DONE)


if __name__ == "__main__":
    verb, place = sys.argv[1:]
    host, _, port = place.rpartition(":")
    {"serve": serve, "send": send}[verb](host, int(port))
