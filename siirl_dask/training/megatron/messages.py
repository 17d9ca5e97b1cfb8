"""Messages between the stages of a replica: hidden states forwards, their gradients backwards.

megatron-core sends the lengths of micro-batches before them, in a batch of messages to the previous
and to the next stage. Of two stages that run several chunks of layers these are the same rank, and
each would take one kind of message for the other. Here lengths go by way of the host, where
messages have tags, and so does all else on CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

_FORWARD, _BACKWARD, _LENGTH_FORWARD, _LENGTH_BACKWARD = range(4)  # tags
_DIMENSIONS = 3  # of hidden states


class StageMessages(P2PCommunicator):  # type: ignore[misc]  # megatron-core may not be here to say its types
    """Sends and receives for megatron-core's schedules."""

    def __init__(self, pp_group: Any, cpu_group: Any, config: Any, device: torch.device) -> None:
        """``cpu_group`` has the ranks of ``pp_group``, and sends what is in the host's memory."""
        super().__init__(pp_group=pp_group, config=config)
        self._cpu_group = cpu_group
        self._device = device

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        """Send the shapes of these tensors, and return those of what the previous and the next
        stage send.
        """
        forward = _shape_to_send(tensor_send_next)
        backward = _shape_to_send(tensor_send_prev)
        previous = None
        if recv_prev:
            previous = torch.zeros(_DIMENSIONS, dtype=torch.int64)
        following = None
        if recv_next:
            following = torch.zeros(_DIMENSIONS, dtype=torch.int64)
        requests = self._start(
            forward, backward, previous, following, (_LENGTH_FORWARD, _LENGTH_BACKWARD)
        )
        for request in requests.values():
            request.wait()
        return _received_shape(previous), _received_shape(following)

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """Send and receive hidden states and gradients; see P2PCommunicator."""
        if self._device.type != "cpu":
            found: tuple[Tensor | None, Tensor | None, Any] = super()._communicate(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
            return found
        shapes = self._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        previous, following = (
            torch.empty(shape, requires_grad=True, dtype=self.config.pipeline_dtype)
            if expected
            else None
            for shape, expected in zip(shapes, (recv_prev, recv_next), strict=True)
        )
        requests = self._start(
            tensor_send_next, tensor_send_prev, previous, following, (_FORWARD, _BACKWARD)
        )
        if wait_on_reqs:
            for request in requests.values():
                request.wait()
        return previous, following, None if wait_on_reqs else requests

    def _start(
        self,
        forward: Tensor | None,
        backward: Tensor | None,
        previous: Tensor | None,
        following: Tensor | None,
        tags: tuple[int, int],
    ) -> dict[str, Any]:
        """Start to send to the next and the previous stage, and to receive from these, by
        megatron-core's names.
        """
        group = self._cpu_group
        (forwards, backwards) = tags
        requests = {}
        if previous is not None:
            requests["recv_prev"] = dist.irecv(previous, self.prev_rank, group, forwards)
        if following is not None:
            requests["recv_next"] = dist.irecv(following, self.next_rank, group, backwards)
        if forward is not None:
            requests["send_next"] = dist.isend(
                forward.contiguous(), self.next_rank, group, forwards
            )
        if backward is not None:
            requests["send_prev"] = dist.isend(
                backward.contiguous(), self.prev_rank, group, backwards
            )
        return requests


def _shape_to_send(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor's shape as a tensor; None if there is none."""
    if tensor is None:
        return None
    return torch.tensor(tensor.shape)


def _received_shape(shape: Tensor | None) -> list[int]:
    """Return a shape that has arrived; zeros if none was expected."""
    if shape is None:
        return [0] * _DIMENSIONS
    numbers: list[int] = shape.tolist()
    return numbers
