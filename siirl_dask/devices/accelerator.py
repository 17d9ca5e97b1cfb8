"""Asks torch about a process's accelerators: which there are, their memory, what they run, whom
they wait for; and allocates memory of the host for copies to them.

torch.accelerator knows one accelerator of a process, whatever its kind, and is asked where it has
an answer for all kinds. Memory is asked of the kind's own module: a plug-in need not have told
torch of its allocator.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from siirl_dask.devices.cpus import kernel
from siirl_dask.devices.kinds import DeviceKind, traits_of
from siirl_dask.devices.topology import CardPlace


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The devices visible to a worker."""

    kind: DeviceKind = DeviceKind.CPU
    cards: tuple[str, ...] = ()
    """Names of the accelerators, unique in the run, in the worker's own order; empty on a CPU."""
    memory: tuple[int, ...] = ()
    """Bytes of each accelerator; empty where they are not known."""
    order: tuple[int, ...] = ()
    """All of them, those with fast links next to each other; empty: as they are."""
    near: tuple[frozenset[int], ...] = ()
    """CPUs near each of them that the worker may use, none where not known; empty where no
    process is to be bound."""
    host: str = ""
    """Name of the kernel that numbers these CPUs; empty where no process is to be bound."""
    pci: tuple[str, ...] = ()
    """Kernel and PCI address of each of them, as in ``Device.pci``; empty where they are not
    known."""


_COPY_ALIGNMENT = 512  # bytes; a copy can be viewed in any dtype
TENSOR_CORES = (8, 0)
"""Compute capability of Ampere, the first of Nvidia's with bfloat16 and FlashAttention."""


def visible_devices() -> VisibleDevices:
    """Return the devices visible to this process."""
    found = kind_here()
    if found is DeviceKind.CPU:
        return VisibleDevices()
    module = _module(found)
    count = module.device_count()
    each = [module.get_device_properties(index) for index in range(count)]
    memory = tuple(int(properties.total_memory) for properties in each)
    if traits_of(found).has_uuids:
        uuids = tuple(str(properties.uuid) for properties in each)
        return VisibleDevices(found, uuids, memory, pci=_pci_of(each))
    visible = os.environ.get(traits_of(found).visible or "")
    return VisibleDevices(found, names_on_host(found, socket.gethostname(), count, visible), memory)


def card_places(kind: DeviceKind) -> tuple[CardPlace, ...]:
    """Return the places of this process's accelerators on the host, as their driver tells them."""
    module = _module(kind)
    count = module.device_count()
    addresses = [_address_of(module.get_device_properties(index)) for index in range(count)]
    indices = host_indices(count, os.environ.get(traits_of(kind).visible or ""))
    places = []
    for address, index in zip(addresses, indices, strict=True):
        number = None
        if not address and index.isdecimal():
            number = int(index)
        places.append(CardPlace(address, number))
    return tuple(places)


def _pci_of(each: Sequence[Any]) -> tuple[str, ...]:
    """Return a name in the whole run for the PCI address of each; nothing where one is not
    known.
    """
    addresses = [_address_of(properties) for properties in each]
    if not all(addresses):
        return ()
    host = kernel()
    return tuple(f"{host}/{address}" for address in addresses)


def _address_of(properties: Any) -> str:
    """Return a PCI address; empty where torch's plug-in does not tell it."""
    if not all(hasattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device")):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def names_on_host(kind: DeviceKind, host: str, count: int, visible: str | None) -> tuple[str, ...]:
    """Return names of this process's devices, made of host and index, for a kind without an id of
    its own.

    ``visible`` is the variable of visible devices: the indices on the host of the ``count`` visible
    ones.
    """
    return tuple(f"{host}/{kind}{index}" for index in host_indices(count, visible))


def host_indices(count: int, visible: str | None) -> list[str]:
    """Return the host's indices of the ``count`` visible devices; ``visible`` as for
    ``names_on_host``.
    """
    listed = []
    if visible:
        listed = [index.strip() for index in visible.split(",")]
    if len(listed) == count:
        return listed
    return [str(index) for index in range(count)]


def bind(kind: DeviceKind, index: int) -> None:
    """Make the device torch's current one in this thread; nothing on a CPU.

    torch keeps one for each thread, beginning with the first: a thread that is not bound would
    allocate there, and hold half a gigabyte of it for its context.
    """
    if kind is not DeviceKind.CPU:
        _module(kind).set_device(index)


def binding() -> Callable[[], None]:
    """Return what makes this thread's accelerator the current one of another thread; nothing
    where there is none.
    """
    if not torch.accelerator.is_available():
        return lambda: None
    return partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())


def forked_random_states() -> AbstractContextManager[Any]:
    """Return a context after which torch's random states are as before: the CPU's, and that of this
    thread's accelerator alone.
    """
    current = torch.accelerator.current_accelerator()
    if current is None or not torch.accelerator.is_available():
        return torch.random.fork_rng(devices=[])
    index = torch.accelerator.current_device_index()
    # torch 2.11 takes CUDA for every device whose kind is not given
    return torch.random.fork_rng(devices=[index], device_type=current.type)


def allocated_bytes(kind: DeviceKind, index: int) -> int:
    """Return the bytes of an accelerator that torch has allocated in this process."""
    return int(_module(kind).memory_allocated(index))


def free_and_total(kind: DeviceKind, index: int) -> tuple[int, int]:
    """Return the free and all bytes of an accelerator; other processes' are not free."""
    free, total = _module(kind).mem_get_info(index)
    return int(free), int(total)


def name_of(kind: str, index: int | None) -> str:
    """Return what its maker calls an accelerator; by default the current one of this thread."""
    return str(_module(kind).get_device_properties(index).name)


def count(kind: DeviceKind) -> int:
    """Return how many accelerators of a kind this process sees."""
    return int(_module(kind).device_count())


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a device whose kind has such; None for others."""
    if device.type != DeviceKind.CUDA:
        return None
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


def torch_has_flash() -> bool:
    """Return whether this torch was built with FlashAttention."""
    return bool(torch.backends.cuda.is_flash_attention_available())


def built_for() -> str | None:
    """Return the version of CUDA that this torch is built for; None for a build for CPUs."""
    return torch.version.cuda


def kind_here() -> DeviceKind:
    """Return the kind of the devices that this process computes on, without touching any of them.

    A plug-in's come first: MindSpeed, once it is imported, has torch.cuda answer for NPUs.
    """
    kinds = [kind for kind in reversed(DeviceKind) if kind is not DeviceKind.CPU]
    return next((kind for kind in kinds if _is_available(kind)), DeviceKind.CPU)


def has_bfloat16(kind: DeviceKind, index: int) -> bool:
    """Return whether an accelerator multiplies in bfloat16, faster than in float32; a kind without
    compute capability does.
    """
    capability = compute_capability(torch.device(str(kind), index))
    if capability is None:
        return True
    return capability >= TENSOR_CORES


def name_if_faster_in_bfloat16(device: torch.device) -> str:
    """Return the accelerator's name where it multiplies faster in bfloat16 than in float32;
    empty elsewhere.
    """
    if device.type == DeviceKind.CPU:
        return ""
    kind = DeviceKind(device.type)
    index = 0
    if device.index is not None:
        index = device.index
    if has_bfloat16(kind, index):
        return name_of(kind, index)
    return ""


def free_cache(kind: str) -> None:
    """Free the memory of the current accelerator that torch's allocator keeps for later; nothing
    on a CPU.
    """
    if kind != DeviceKind.CPU:
        _module(kind).empty_cache()


def free_host_cache(kind: DeviceKind) -> None:
    """Free the pinned memory of the host that torch keeps for later, where it keeps any."""
    if traits_of(kind).keeps_host_cache and torch.accelerator.is_available():
        if hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()
        else:  # torch 2.11
            torch._C._host_emptyCache()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it; nothing on a CPU."""
    if device.type != DeviceKind.CPU:
        _module(device.type).synchronize(device)


def pins_host_memory(device: torch.device) -> bool:
    """Return whether copies between the device and the host are faster, and overlap, with pinned
    memory there.
    """
    return device.type != DeviceKind.CPU


def copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host on a device, without waiting for what the device was asked to do
    before; on a CPU it is the tensor itself.

    A copy from memory that is not pinned waits for the stream. torch records when a copy from what
    ``pin_memory`` made is done, and does not use that memory again before.
    """
    if not pins_host_memory(device):
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def host_memory(sizes: Mapping[int, int], *, pinned: bool) -> dict[int, Tensor]:
    """Allocate memory of each size in bytes: uint8 [size] by key, each a storage of its own in
    pieces that they share.

    torch's allocator does not know which copies use it: wait for these before it is given back.
    Pinned memory that was given back stays with the allocator, for the next who asks for as much.
    """
    places, used = share_pieces(sizes)
    pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy() for size in used]
    # a view of a tensor would share its storage, and DCP copies whole storages
    return {
        key: torch.from_numpy(pieces[at][start : start + sizes[key]])
        for key, (at, start) in places.items()
    }


def share_pieces(sizes: Mapping[int, int]) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Return the piece and the place in it for each size, and the sizes of the pieces.

    torch rounds pinned memory up to powers of two, so a piece is at most the power of two that
    holds the largest.
    """
    largest = 1 << max([_COPY_ALIGNMENT, *sizes.values()]).bit_length()
    used: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        room = -(-size // _COPY_ALIGNMENT) * _COPY_ALIGNMENT
        number = next((at for at, taken in enumerate(used) if taken + room <= largest), len(used))
        if number == len(used):
            used.append(0)
        places[key] = number, used[number]
        used[number] += room
    return places, used


def has_graphs(device: torch.device) -> bool:
    """Return whether steps of the device can be captured and replayed."""
    return device.type == DeviceKind.CUDA


def graph_capture(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return what captures a step as a graph of a device that has graphs, and returns its replay.

    A step is run twice before it is captured, so that kernels are chosen and libraries have their
    memory; running it again must not change what it computes. Graphs share the memory of what a
    step needs while it runs: only one of them may run at a time, and what it leaves must be in
    tensors that were there before. A step that a graph cannot hold raises, and leaves the thread's
    stream and torch's allocator as they were.
    """
    pool = torch.cuda.graph_pool_handle()
    aside = _stream_of_captures(device)

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(2):
                step()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # other threads of a worker may allocate meanwhile
        capturing = torch.cuda.graph(
            graph, pool=pool, stream=aside, capture_error_mode="thread_local"
        )
        try:
            # torch leaves its stream current where a capture cannot be ended
            with torch.cuda.stream(current), capturing:
                step()
        except Exception:
            _end_failed_capture(device, pool, graph)
            raise
        return graph.replay

    return capture


@cache
def _stream_of_captures(device: torch.device) -> Any:
    """Return the stream of all captures of this process on a device.

    torch's own is of the device that was the process's first to have one. cuBLAS gets memory for
    each stream that it is used on, 32 MiB on Hopper, which torch does not free: an engine that
    sleeps between steps captures anew after each, and torch gives 32 streams in turn.
    """
    return torch.cuda.Stream(device)


_failed_captures: list[Any] = []


def _end_failed_capture(device: torch.device, pool: tuple[int, int], graph: Any) -> None:
    """Let torch's allocator know that a capture is over, which torch does only where the driver
    could end it.

    Else the allocator takes it to be under way for as long as the process lives, and the next
    ``empty_cache`` fails (captures_underway in CUDACachingAllocator.h).
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:
        return  # the driver ended it, and so it is over
    torch._C._cuda_releasePool(index, pool)
    # the allocator of pinned memory still asks the graph whose memory is the capture's
    _failed_captures.append(graph)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Call torch's attention, with a mask, causal, or to all keys. [n, H, L, D], [n, H_kv, L', D]
    twice -> [n, H, L, D].
    """
    grouped = query.shape[1] != key.shape[1]
    if grouped and not _takes_groups(query, masked=mask is not None):
        shared = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(shared, dim=1)
        value = value.repeat_interleave(shared, dim=1)
        grouped = False
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _takes_groups(query: Tensor, *, masked: bool) -> bool:
    """Return whether torch's attention takes queries that share keys without a matrix of all scores
    in memory.

    On CUDA FlashAttention alone takes them, which knows no mask and no float32 (torch's
    documentation of scaled_dot_product_attention): another kernel does, of keys for each query.
    """
    if query.device.type != DeviceKind.CUDA:
        return True
    if masked:
        return False
    return query.dtype != torch.float32


def autocast(device: torch.device, *, enabled: bool) -> AbstractContextManager[Any]:
    """Return a context in which arithmetic on the device is bfloat16's, if ``enabled``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def arithmetic_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a product of the tensor is computed: under autocast, autocast's."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _is_available(kind: DeviceKind) -> bool:
    module: Any = getattr(torch, kind, None)  # a plug-in adds its own when torch imports it
    if module is None:
        return False
    return bool(module.is_available())


def _module(kind: str) -> Any:
    return torch.get_device_module(str(kind))
