"""A program: one raw TCP stream and round trips between two hosts.

``receive ADDRESS`` on one host, ``send ADDRESS`` on the other, which prints rate and round trip as
JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from statistics import median

PORT, SIZE, ROUNDS, PINGS = 7911, 48 * 2**20, 5, 50
"""A stream is as long as the model's weights, and each begins after a pause: so does each of a
step."""


def receive(address: str) -> None:
    server = socket.create_server((address, PORT))
    print("ready", flush=True)
    peer, _ = server.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(2**20)
    for _ in range(PINGS):
        peer.recv_into(buffer, 1)
        peer.sendall(b"x")
    for _ in range(ROUNDS):
        left = SIZE
        while left:
            left -= peer.recv_into(buffer, min(left, len(buffer)))
        peer.sendall(b"x")


def send(address: str) -> None:
    peer = socket.create_connection((address, PORT))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data, pings, streams = bytes(SIZE), [], []
    for _ in range(PINGS):
        began = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        pings.append(time.perf_counter() - began)
    for _ in range(ROUNDS):
        time.sleep(0.5)
        began = time.perf_counter()
        peer.sendall(data)
        peer.recv(1)
        streams.append(time.perf_counter() - began)
    # cores that others take make a link look slow: the best stream, less the round trip that asks
    # for its end
    print(json.dumps({"rate": SIZE / (min(streams) - min(pings)), "round_trip": median(pings)}))


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](sys.argv[2])
