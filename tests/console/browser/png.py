"""Makes a picture of a page small: a palette of 256 colours is enough for text, and needs no library."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from pathlib import Path

MAGIC = b"\x89PNG\r\n\x1a\n"
COLOURS = 256


def shrink(path: Path) -> None:
    """Rewrite an RGB or RGBA picture with a palette, if that makes it smaller."""
    width, height, channels, rows = _read(path.read_bytes())
    pixels = [row[start : start + 3] for row in rows for start in range(0, width * channels, channels)]
    common = Counter(pixels).most_common()
    palette = [colour for colour, _ in common[:COLOURS]]
    index = {colour: place for place, colour in enumerate(palette)}
    for colour, _ in common[COLOURS:]:  # rare ones, at the edges of letters: the nearest will do
        index[colour] = _nearest(palette, colour)
    flat = bytes(index[pixel] for pixel in pixels)
    raw = b"".join(b"\x00" + flat[start : start + width] for start in range(0, width * height, width))
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    table = b"".join(palette)
    parts = ((b"IHDR", header), (b"PLTE", table), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    made = MAGIC + b"".join(_chunk(kind, content) for kind, content in parts)
    if len(made) < path.stat().st_size:
        path.write_bytes(made)


def _nearest(palette: list[bytes], colour: bytes) -> int:
    return min(range(len(palette)), key=lambda place: _distance(palette[place], colour))


def _distance(one: bytes, other: bytes) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _read(content: bytes) -> tuple[int, int, int, list[bytes]]:
    """Width, height, bytes a pixel, and the rows without their filters."""
    place, packed = len(MAGIC), b""
    width = height = channels = 0
    while place < len(content):
        size, kind = struct.unpack(">I4s", content[place : place + 8])
        body = content[place + 8 : place + 8 + size]
        if kind == b"IHDR":
            width, height, _, colour = struct.unpack(">IIBB", body[:10])
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            packed += body
        place += 12 + size
    raw, stride = zlib.decompress(packed), width * channels
    rows: list[bytes] = []
    before = bytes(stride)
    for number in range(height):
        start = number * (stride + 1)
        before = _unfilter(raw[start], raw[start + 1 : start + 1 + stride], before, channels)
        rows.append(before)
    return width, height, channels, rows


def _unfilter(kind: int, line: bytes, above: bytes, step: int) -> bytes:
    if kind == 0:
        return line
    found = bytearray(line)
    for place in range(len(line)):
        left = found[place - step] if place >= step else 0
        up = above[place]
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        else:
            guess = _paeth(left, up, above[place - step] if place >= step else 0)
        found[place] = (line[place] + guess) & 0xFF
    return bytes(found)


def _paeth(left: int, up: int, corner: int) -> int:
    estimate = left + up - corner
    far = (abs(estimate - left), abs(estimate - up), abs(estimate - corner))
    return (left, up, corner)[far.index(min(far))]
