"""Gives vLLM prompts with images, and checks that it reads them as they are.

vLLM expands placeholders itself: it wants one for each image, and pictures. One that is expanded
already it expands again, and a prompt without its pictures it reads as text, both silently. So the
ids that it has read are compared with those that were meant, for every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import RequestOutput, TokensPrompt
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.llm_engine import LLMEngine

from siirl_dask.config import parse_bytes
from siirl_dask.errors import DataError
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.rollout.engine import GenerationRequest, check_no_images
from siirl_dask.rollout.image_prompts import collapsed, places_of


def image_arguments(processor: ImageProcessor | None) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for a model with a part for images; without a processor
    it gets texts alone, and vLLM builds no such part.
    """
    if processor is None:
        return {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}}
    least, most = processor.pixel_limits
    return {
        "skip_tokenizer_init": False,  # vLLM's own processor wants the tokenizer
        "limit_mm_per_prompt": {"image": processor.settings.most, "video": 0},
        "mm_processor_kwargs": {"size": {"shortest_edge": least, "longest_edge": most}},
        "mm_processor_cache_gb": parse_bytes("images.cache", processor.settings.cache) / 2**30,
    }


def prompt_of(
    request: GenerationRequest, processor: ImageProcessor | None, engine: LLMEngine
) -> Any:
    """Return vLLM's prompt of a request, with the pictures that the processor makes of its images.

    DataError where it has other placeholders than its images have tokens; ConfigError for images
    without a processor.
    """
    if processor is None:
        check_no_images([request])
        return TokensPrompt(prompt_token_ids=list(request.prompt))
    places = places_of(request, processor)
    if not request.images:
        return TokensPrompt(prompt_token_ids=list(request.prompt))
    last = places[-1].start
    token = processor.image_token
    shown = {at for place in places for at in place}
    sampled = [
        at for at, one in enumerate(request.prompt[:last]) if one == token and at not in shown
    ]
    if not sampled:  # those behind all images vLLM takes as they are
        return _with_pictures(collapsed(request.prompt, places), request, processor)
    # A placeholder that was sampled before an image would be taken for it: another token stands in
    # for it meanwhile.
    ids = list(request.prompt)
    for at in sampled:
        ids[at] = int(token == 0)
    read = _rendered(_with_pictures(collapsed(ids, places), request, processor), engine)
    for at in sampled:
        read["prompt_token_ids"][at] = token
    return read


def _rendered(prompt: TokensPrompt, engine: LLMEngine) -> Any:
    """Return a prompt as vLLM's engine takes it, after vLLM has expanded its placeholders."""
    renderer = engine.input_processor.renderer
    parsed = parse_model_prompt(engine.model_config, prompt)
    return renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)[0]


def _with_pictures(
    ids: list[int], request: GenerationRequest, processor: ImageProcessor
) -> TokensPrompt:
    return TokensPrompt(
        prompt_token_ids=ids,
        multi_modal_data={"image": [*map(processor.picture, request.images)]},
        # of content and settings: an id that another picture had would give that one's features,
        # silently
        multi_modal_uuids={"image": [*map(processor.identity, request.images)]},
    )


def check_read(output: RequestOutput, prompt: Sequence[int]) -> None:
    """Raise DataError unless vLLM has read ``prompt``."""
    read = list(output.prompt_token_ids or ())
    if read != list(prompt):
        raise DataError(
            f"vLLM reads a prompt of {len(prompt)} tokens with images as {len(read)} tokens: its "
            "own processor of images does otherwise than siirl_dask's with the same settings; "
            "take rollout.engine=transformers"
        )
