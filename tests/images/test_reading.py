"""Image files that nobody has checked are read, or refused by what they are."""

import base64
import io
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from PIL import Image as pil
from PIL import ImageOps
from siirl_storage import join, open_fs

from siirl_dask.errors import ImageError
from siirl_dask.images.reading import decode, fetch, format_of, size_of
from tests.images.pictures import encoded, exif_of, noise, png, png_header, rotated_jpeg

MANY = 10**6
LARGE = png(400, 400)  # of more bytes than one read of a connection gives


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_and_the_picture_are_those_after_the_rotation_that_a_camera_wrote(orientation):
    data = rotated_jpeg(noise(16, 24), orientation)
    shown = ImageOps.exif_transpose(pil.open(io.BytesIO(data)))
    assert size_of(data, MANY) == shown.size == decode(data, MANY).size
    assert np.array_equal(np.asarray(decode(data, MANY)), np.asarray(shown))


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0no such thing",
        exif_of(kind=2, value=b"x\0\0\0"),
        exif_of(kind=7, value=b"\6\0\0\0"),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_taken_whatever_its_exif_data_are(kind, exif):
    data = encoded(noise(16, 24), kind, exif=exif)
    assert size_of(data, MANY) == decode(data, MANY).size == (16, 24)


def test_a_size_is_read_from_the_header_alone():
    whole = encoded(noise(64, 48))
    assert size_of(whole[:200], MANY) == (64, 48)
    with pytest.raises(ImageError, match="damaged or cut off"):
        decode(whole[:200], MANY)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_each_format_is_read_as_rgb(kind):
    picture = decode(encoded(noise(16, 24), kind), MANY)
    assert (picture.mode, picture.size) == ("RGB", (16, 24))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_each_mode_is_read_as_rgb(mode):
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    picture = decode(encoded(pil.new(mode, (8, 8)), kind), MANY)
    assert (picture.mode, picture.size) == ("RGB", (8, 8))


def test_what_is_transparent_is_white_whatever_colour_lies_under_it():
    clear = pil.new("RGBA", (4, 4), (255, 0, 0, 0))
    half = pil.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert decode(encoded(clear), MANY).getpixel((0, 0)) == (255, 255, 255)
    assert decode(encoded(half), MANY).getpixel((0, 0)) == (255, 127, 127)
    palette = pil.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert decode(encoded(palette, transparency=1), MANY).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_keep_their_grey_values():
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    grey = np.asarray(decode(encoded(pil.fromarray(ramp)), MANY))
    assert np.abs(grey[..., 0].ravel() - np.arange(256)).max() <= 1
    assert (grey[..., 0] == grey[..., 2]).all()


def test_an_animation_is_its_first_picture():
    frames = [pil.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data, MANY).getpixel((0, 0)) == (255, 0, 0)


def test_a_jpeg_with_a_second_picture_as_cameras_write_it_is_a_jpeg():
    pictures = [pil.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(pictures[0], "MPO", save_all=True, append_images=pictures[1:])
    assert (format_of(data, MANY), decode(data, MANY).getpixel((0, 0))) == ("JPEG", (254, 0, 0))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            b"not an image at all",
            r"it is no JPEG, PNG, WebP, GIF or BMP: it begins with b'not an image",
        ),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is no JPEG"),
        (encoded(noise(4, 4), "TIFF"), "it is no JPEG"),
        (encoded(noise(32, 32), "JPEG")[:-200], "damaged or cut off"),
        (
            png_header(2000, 2000),
            r"2,000 x 2,000 pixels: expected at most 1,000,000 in all \(images.max_source_pixels\)",
        ),
        (png_header(60000, 60000), "images.max_source_pixels"),
        (png_header(0, 8), "0 x 8 pixels|damaged|no JPEG"),
    ],
)
def test_what_is_no_whole_image_is_refused_by_what_it_is(data, said):
    with pytest.raises(ImageError, match=said):
        decode(data, MANY)


def test_a_file_is_fetched_from_any_store_within_its_limit(store_url):
    data, url = png(), join(store_url, "a.png")
    fs, path = open_fs(url)
    fs.makedirs(fs._parent(path), exist_ok=True)
    fs.pipe_file(path, data)
    assert fetch(url, max_bytes=len(data), timeout=30) == data
    with pytest.raises(
        ImageError, match=f"more than {len(data) - 1:,} bytes: expected at most {len(data) - 1:,}"
    ):
        fetch(url, max_bytes=len(data) - 1, timeout=30)
    with pytest.raises(ImageError, match="cannot be read"):
        fetch(join(store_url, "b.png"), max_bytes=99, timeout=30)


@pytest.fixture
def server_without_sizes() -> Iterator[str]:
    """URL of a server that sends a picture of noise, and neither tells its size nor takes
    requests for parts of it.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            for at in range(0, len(LARGE), 1000):  # in parts, as over a network
                self.wfile.write(LARGE[at : at + 1000])

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.png"
        server.shutdown()


def test_a_file_comes_whole_from_a_server_that_does_not_tell_its_size(server_without_sizes):
    pytest.importorskip("aiohttp")
    assert fetch(server_without_sizes, max_bytes=len(LARGE), timeout=30) == LARGE
    with pytest.raises(ImageError, match=f"more than {len(LARGE) - 1:,} bytes"):
        fetch(server_without_sizes, max_bytes=len(LARGE) - 1, timeout=30)


def test_an_image_within_its_url_is_not_repeated_in_messages():
    url = "data:image/png;base64," + base64.b64encode(LARGE).decode()
    for wrong in (url, "nope://" + url):
        with pytest.raises(ImageError) as told:
            fetch(wrong, max_bytes=1000, timeout=30)
        assert len(str(told.value)) < 1000
