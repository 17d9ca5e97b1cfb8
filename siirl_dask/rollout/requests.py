"""Generation requests and their results as plain data, for workers that serve each other's
requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from math import isfinite
from reprlib import repr as short
from typing import Any

import numpy as np

from siirl_dask.context import Codec
from siirl_dask.errors import PeerError
from siirl_dask.images import Image
from siirl_dask.rollout.engine import FinishReason, Generation, GenerationRequest, Sampling


@dataclass(frozen=True, slots=True)
class Sampled:
    """A generation and the name of the worker that made it."""

    generation: Generation
    worker: str


class ImageMessage:
    """Packs or reads the images of one message, in its order. The bytes of an image are in it once:
    whoever shows it again has their digest.
    """

    def __init__(self) -> None:
        self._images: dict[bytes, Image] = {}

    def pack(self, image: Image) -> dict[str, Any]:
        """Return an image as plain data."""
        if image.data is None:
            return {"path": image.path}
        digest = sha256(image.data).digest()
        if digest in self._images:
            return {"seen": digest}
        self._images[digest] = image
        return {"bytes": image.data}

    def read(self, value: object) -> Image:
        """Return the image in ``value``. PeerError for anything else."""
        match value:
            case {"path": str(path)}:
                return Image(None, path)
            case {"bytes": bytes(data)}:
                return self._images.setdefault(sha256(data).digest(), Image(data))
            case {"seen": bytes(digest)} if digest in self._images:
                return self._images[digest]
        raise PeerError(f"received {short(value)}, which is no image")


class RequestMessage:
    """Packs or reads the requests of one message, in its order, and each of their images once."""

    def __init__(self, version: int) -> None:
        """``version`` is the version of the weights that must sample them."""
        self._version = version
        self._images = ImageMessage()

    def pack(self, request: GenerationRequest) -> dict[str, Any]:
        """Return a request as plain data."""
        return {
            "prompt": np.asarray(request.prompt, "<i8").tobytes(),
            "seed": request.seed,
            "sampling": asdict(request.sampling),
            "begun": request.begun,
            "version": self._version,
            "images": [*map(self._images.pack, request.images)],
            "starts": None if request.image_starts is None else [*request.image_starts],
        }

    def read(self, value: object) -> GenerationRequest:
        """Return the request in ``value``. PeerError for anything else, and for other weights
        than these.
        """
        match value:
            case {
                "prompt": bytes(prompt),
                "seed": int(seed),
                "sampling": dict(sampling),
                "begun": int(begun),
                "version": int(wanted),
                "images": list(images) | tuple(images),
                "starts": starts,
            }:
                if wanted != self._version:
                    raise PeerError(
                        f"was given a prompt for weights of version {wanted}: those here are "
                        f"{self._version}"
                    )
                shown = tuple(map(self._images.read, images))
                places = _starts(starts, len(shown))
                return GenerationRequest(
                    _numbers(prompt, "<i8"),
                    seed,
                    sampling=_sampling(sampling),
                    begun=begun,
                    images=shown,
                    image_starts=places,
                )
        raise PeerError(f"received {short(value)}, which is no generation request")


def pack_sampled(sampled: Sampled) -> dict[str, Any]:
    """Return a sample as plain data."""
    sample = sampled.generation
    tokens = np.asarray(sample.token_ids, "<i8").tobytes()
    logprobs = np.asarray(sample.logprobs, "<f8").tobytes()
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "reason": str(sample.finish_reason),
        "worker": sampled.worker,
        "routes": sample.routes,
        "versions": None
        if sample.versions is None
        else np.asarray(sample.versions, "<i8").tobytes(),
    }


def read_sampled(value: object) -> Sampled:
    """Return the sample in ``value``. PeerError for anything else."""
    match value:
        case {
            "tokens": bytes(tokens),
            "logprobs": bytes(logprobs),
            "reason": str(reason),
            "worker": str(worker),
            "routes": None | bytes() as routes,
            "versions": None | bytes() as packed_versions,
        }:
            ids = _numbers(tokens, "<i8")
            scores = _numbers(logprobs, "<f8")
            versions = None if packed_versions is None else _numbers(packed_versions, "<i8")
            if (
                len(ids) == len(scores)
                and (
                    versions is None
                    or (len(versions) == len(ids) and min(versions, default=0) >= 0)
                )
                and all(map(isfinite, scores))
                and reason in list(FinishReason)
            ):
                sample = Generation(ids, scores, FinishReason(reason), routes, versions)
                return Sampled(sample, worker)
    raise PeerError(f"received {short(value)}, which is no sample")


def request_codec(version: int) -> Codec[GenerationRequest, Sampled]:
    """Return the codec of requests and samples for work that peers take over, at this version of
    the weights.
    """
    message = RequestMessage(version)
    return Codec(
        pack_item=message.pack,
        read_item=message.read,
        pack_result=pack_sampled,
        read_result=read_sampled,
        renewed=partial(request_codec, version),
    )


def _starts(value: object, images: int) -> tuple[int, ...] | None:
    """Return the places of ``images`` images in ``value``. PeerError for anything else."""
    if value is None:
        return None
    if (
        isinstance(value, list | tuple)
        and len(value) == images
        and all(isinstance(at, int) for at in value)
    ):
        return tuple(value)
    raise PeerError(f"received {short(value)} for the places of {images} images")


def _sampling(message: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters in ``message``. PeerError for anything else."""
    known = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float}
    stops = message.get("stop_token_ids")
    if not isinstance(stops, list | tuple) or not all(isinstance(token, int) for token in stops):
        raise PeerError(f"received {short(stops)} for tokens that end a response")
    valid = message.keys() == {*known, "stop_token_ids"}
    if not valid or not all(isinstance(message[name], int | kind) for name, kind in known.items()):
        raise PeerError(f"received {short(message)}, which are no sampling parameters")
    return Sampling(
        **{name: kind(message[name]) for name, kind in known.items()}, stop_token_ids=tuple(stops)
    )


def _numbers(packed: bytes, kind: str) -> list[Any]:
    """Return numbers of 8 bytes. PeerError for a length that is no multiple of 8."""
    if len(packed) % 8:
        raise PeerError(f"received {len(packed)} bytes where numbers of 8 were expected")
    return list(np.frombuffer(packed, kind).tolist())
