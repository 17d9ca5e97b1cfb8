"""Bad images and bad placeholders are errors of their rows before anything is generated; unusual
ones are read.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image as pil

from siirl_dask.config import ImagesConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import DataError, ImageError
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.nodes import encode_prompts
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer, load_tokenizer
from tests.images.pictures import encoded, noise, png, png_header, rotated_jpeg

STRUCTS = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
GREY16 = pil.fromarray(np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16))


@dataclass
class Reader:
    """Tokenizer and processor, as encode_prompts takes them from an engine."""

    tokenizer: HuggingFaceTokenizer
    processor: ImageProcessor


@pytest.fixture(scope="module")
def encode(tiny_folders):
    return encoder(tiny_folders, timeout=60.0)


def encoder(tiny_folders, timeout):
    """Return a function that encodes prompts with images."""
    folder = str(tiny_folders["qwen2_5_vl"])
    settings = ImagesConfig(
        column="pictures", max_bytes="8kB", max_source_pixels=250_000, most=3, timeout=timeout
    )
    reader = Reader(load_tokenizer(folder, "model"), ImageProcessor.load(folder, settings))

    def encode(*rows, kind=STRUCTS):
        prompts, images = zip(*rows, strict=True)
        ids = pa.array(range(len(rows)), pa.int64())
        columns = {
            "row_id": ids,
            "group_id": ids,
            "tokens": ids,
            "data_part": ids,
            "data_row": pa.array([7 + at for at in range(len(rows))]),
        }
        table = pa.table(
            {**columns, "prompt": pa.array(prompts), "pictures": pa.array(images, kind)}
        )
        ctx = Context(step=5, run_seed=0, rank=Rank(), device=Device("w"), resource=reader)
        return encode_prompts(ctx, table, max_prompt_length=500, images=settings)

    return encode


@pytest.fixture(scope="module")
def server():
    """A web server whose files are other than it says."""
    data = png(40, 40)

    class Liar(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer()

        def do_GET(self):
            self.answer()
            if self.command == "GET" and self.path != "/gone":
                self.wfile.write(
                    {"/cut": data[: len(data) // 2], "/more": data}.get(self.path, data * 100)
                )

        def answer(self):
            self.send_response(404 if self.path == "/gone" else 200)
            if self.path in ("/cut", "/more"):
                self.send_header("Content-Length", str(len(data) // 2))
            self.send_header("Connection", "close")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def data(value):
    return {"bytes": value, "path": None}


def path(value):
    return {"bytes": None, "path": value}


GOOD = ("<image>red?", [data(png(16, 16))])
BAD = {
    "a file that is missing": (
        [path("/nowhere/a.png")],
        "image 1 of 1: '/nowhere/a.png' cannot be read: FileNotFound",
    ),
    "a folder": ([path("/tmp")], "'/tmp' cannot be read"),
    "a relative path": ([path("a.png")], "its path 'a.png' is relative: set images.folder"),
    "an empty path": ([path("")], "its path is empty"),
    "a protocol that is unknown": ([path("s4://a/b.png")], "'s4://a/b.png' cannot be read"),
    "no bytes": ([data(b"")], "it is empty"),
    "a text": (
        [data(b"just a text")],
        "it is no JPEG, PNG, WebP, GIF or BMP: it begins with b'just a text",
    ),
    "a JPEG cut off": ([data(encoded(noise(32, 32), "JPEG")[:-300])], "it is damaged or cut off"),
    "a PNG cut off": ([data(png(40, 40)[:-900])], "it is damaged or cut off"),
    "a PNG whose pixels are damaged": (
        [data(png(40, 40)[:99] + b"?" * 9 + png(40, 40)[108:])],
        "it is damaged",
    ),
    "a header without pixels": ([data(png(40, 40)[:60])], "it is damaged or cut off"),
    "a bomb": ([data(png_header(30000, 30000))], "images.max_source_pixels"),
    "too many pixels": (
        [data(png_header(1000, 300))],
        r"1,000 x 300 pixels: expected at most 250,000",
    ),
    "too many bytes": (
        [data(png(70, 70))],
        r"it has 14,\d+ bytes: expected at most 8,000 \(images.max_bytes\)",
    ),
    "an unsupported format": ([data(encoded(noise(4, 4), "TIFF"))], "it is no JPEG"),
    "a null": ([None], "image 1 of 1 is null"),
    "an entry of nulls": ([data(png()), path(None)], "image 2 of 2 is null"),
    "sides of a ratio above 200": (
        [data(png(500, 2))],
        "500 x 2 pixels, which the model cannot take: .*200",
    ),
    "fewer places than images": (
        [data(png()), data(png())],
        "1 place for images and 2 images: expected as many",
    ),
    "more places than images": ([], "1 place for images and no images: expected as many"),
    "the second of two": ([data(png()), data(b"x")], "1 place for images and 2 images"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_an_error_of_its_row_before_anything_is_generated(encode, kind):
    images, said = BAD[kind]
    with pytest.raises(
        ImageError, match=rf"row 1 of step 5 \(row 8 of part 1 of the dataset\): .*{said}"
    ) as raised:
        encode(GOOD, ("<image>red?", images))
    assert raised.value.origin.rows == (1,)


@pytest.mark.parametrize(
    ("prompt", "images", "said"),
    [
        ("<image>a<image>red?", [data(png()), data(b"x")], "image 2 of 2: it is no JPEG"),
        ("<image> " * 4, [data(png())] * 4, r"4 images: expected at most 3 \(images.most\)"),
        ("<|image_pad|><image>", [data(png())], "2 places for images and 1 image"),
        ("red?", [data(png())], "no places for images and 1 image"),
    ],
)
def test_a_bad_count_is_an_error_of_its_row(encode, prompt, images, said):
    with pytest.raises(ImageError, match=rf"row 0 of step 5 .*{said}"):
        encode((prompt, images))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone", "cannot be read"),
        ("cut", "damaged or cut off"),
        ("more", "damaged or cut off|cannot be read"),
        ("long", r"more than 8,000 bytes"),
    ],
)
def test_a_url_that_is_not_there_or_lies_is_an_error_of_its_row(encode, server, name, said):
    with pytest.raises(ImageError, match=rf"row 0 .*image 1 of 1: .*({said})") as raised:
        encode(("<image>red?", [path(f"{server}/{name}")]))
    assert len(str(raised.value)) < 500, "what a server answers is no message"


def test_a_url_that_hangs_is_an_error_within_its_time(tiny_folders):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"
        with pytest.raises(
            ImageError, match=r"row 0 .*did not come within images.timeout=0.5 seconds"
        ):
            encoder(tiny_folders, timeout=0.5)(("<image>red?", [path(url)]))
    for thread in [one for one in threading.enumerate() if one.name == "siirl-image"]:
        thread.join(20)
        assert not thread.is_alive(), "what nobody waits for any more is still tried again"


@pytest.mark.parametrize(
    "kind", [pa.int32(), pa.list_(pa.int64()), pa.struct({"uri": pa.string()})], ids=str
)
def test_a_column_of_another_type_is_refused_by_name(encode, kind):
    with pytest.raises(DataError, match="column 'pictures' has type"):
        encode(("red?", None), kind=kind)


FINE = {
    "an animation": (
        encoded(noise(16, 16), "GIF", save_all=True, append_images=[noise(16, 16, 1)]),
        4,
    ),
    "CMYK": (encoded(noise(16, 16).convert("CMYK"), "JPEG"), 4),
    "16 bits": (encoded(GREY16), 4),
    "transparent": (encoded(noise(16, 16).convert("RGBA")), 4),
    "a palette": (encoded(noise(16, 16).convert("P")), 4),
    "one pixel": (png(1, 1), 1),
    "a line": (png(200, 1), 15),
    "turned by its camera": (rotated_jpeg(noise(16, 32), 6), 8),
}


@pytest.mark.parametrize("kind", FINE)
def test_an_unusual_image_is_read_and_counted(encode, kind):
    content, tokens = FINE[kind]
    table = encode(GOOD, ("<image>red?", [data(content)]))
    ids = table["prompt_ids"].to_pylist()[1]
    assert ids.count(260) == tokens
    assert table["prompt_text"][1].as_py() == "<|vision_start|><|image_pad|><|vision_end|>red?"
