"""Draws sample images from formulas, so that no download is required and no copyright applies."""

import io
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import TypeAlias

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Field: TypeAlias = NDArray[np.float32]  # one value for each pixel
Picture: TypeAlias = NDArray[np.float32]  # height × width × 3, 0 to 1
Colour: TypeAlias = tuple[float, float, float]

WIDTH, HEIGHT = 640, 800
JPEG_QUALITY = 90
CLIP_SIZE, CLIP_FRAMES, CLIP_FPS = (320, 400), 36, 12


def jpeg(picture: Picture) -> bytes:
    target = io.BytesIO()
    _image(picture).save(target, "JPEG", quality=JPEG_QUALITY)
    return target.getvalue()


def _image(picture: Picture) -> Image.Image:
    return Image.fromarray((np.clip(picture, 0, 1) * 255).astype(np.uint8))


@cache
def _grid() -> tuple[Field, Field]:
    """Returns x from 0 to 1, and y from 0 (the top) to 1.25, so that both have the same unit."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32) / WIDTH
    return x, y


def _noise(x: Field, y: Field, seed: int, octaves: int = 4) -> Field:
    """Returns fractal value noise from 0 to 1."""
    total, weight = np.zeros(np.broadcast(x, y).shape, np.float32), 0.0
    for octave in range(octaves):
        corner = np.random.default_rng((seed, octave)).random((64, 64), dtype=np.float32)
        u, v = x * 4 * 2**octave + 7 * octave, y * 4 * 2**octave + 3 * octave
        column, row = np.floor(u).astype(int), np.floor(v).astype(int)
        a, b = _smooth(u - column), _smooth(v - row)
        column_0, column_1, row_0, row_1 = column % 64, (column + 1) % 64, row % 64, (row + 1) % 64
        upper = corner[row_0, column_0] * (1 - a) + corner[row_0, column_1] * a
        lower = corner[row_1, column_0] * (1 - a) + corner[row_1, column_1] * a
        total += (upper * (1 - b) + lower * b) * 0.5**octave
        weight += 0.5**octave
    return total / weight


def _smooth(t: Field) -> Field:
    return np.clip(t, 0, 1) ** 2 * (3 - 2 * np.clip(t, 0, 1))


def _step(value: Field, edge: Field | float, soft: float = 0.002) -> Field:
    """Returns 0 below the edge and 1 above it, with a transition of width `soft`."""
    return _smooth((value - edge) / soft + 0.5)


def _fill(colour: Colour) -> Picture:
    return np.broadcast_to(np.float32(colour), (HEIGHT, WIDTH, 3)).copy()


def _mix(below: Picture, above: Picture | Colour, share: Field) -> Picture:
    return below + (np.float32(above) - below) * share[..., None]


def _gradient(y: Field, *stops: tuple[float, Colour]) -> Picture:
    places = [place for place, _ in stops]
    channels = [np.interp(y, places, [colour[band] for _, colour in stops]) for band in range(3)]
    return np.stack(channels, axis=-1).astype(np.float32)


def _grain(picture: Picture, seed: int, strength: float = 0.02) -> Picture:
    spread = np.random.default_rng(seed).normal(0, strength, (HEIGHT, WIDTH, 1))
    return picture + spread.astype(np.float32)


def ridges() -> Picture:
    """Draws mountain ridges at dusk."""
    x, y = _grid()
    picture = _gradient(
        y, (0.0, (0.20, 0.28, 0.48)), (0.45, (0.86, 0.56, 0.46)), (0.62, (0.99, 0.80, 0.56))
    )
    sun = np.hypot(x - 0.66, y - 0.43)
    picture = _mix(picture, (1.0, 0.90, 0.70), np.exp(-sun * 7) * 0.7)
    picture = _mix(picture, (1.0, 0.96, 0.84), 1 - _step(sun, 0.055))
    for number in range(6):
        near = number / 5
        line = (
            0.50
            + 0.12 * number
            - (0.10 + 0.10 * near) * _noise(x[:1] + number, np.float32(number), 3 + number, 5)
        )
        colour = (0.62 - 0.52 * near, 0.44 - 0.34 * near, 0.50 - 0.34 * near)
        haze = _gradient(
            y - line, (0.0, colour), (0.22, tuple(0.5 * part + 0.36 for part in colour))
        )
        picture = _mix(picture, haze, _step(y, line))
    return _grain(picture, 1, 0.012)


def shore() -> Picture:
    """Draws the sea with the sun above it."""
    x, y = _grid()
    horizon = 0.52
    picture = _gradient(y, (0.0, (0.16, 0.42, 0.66)), (horizon, (0.94, 0.80, 0.62)))
    cloud = _smooth((_noise(x * 0.8, y * 3.2, 21) - 0.48) * 4) * (1 - y / horizon * 0.5)
    picture = _mix(picture, (0.98, 0.90, 0.84), np.clip(cloud, 0, 1) * 0.85)
    deep = np.clip((y - horizon) / 0.55, 0, 1)
    wave = _noise(x * (6 - 4 * deep), (y - horizon) * (30 - 22 * deep), 22, 4)
    sea = _gradient(
        y, (horizon, (0.50, 0.66, 0.70)), (0.8, (0.06, 0.32, 0.42)), (1.05, (0.04, 0.24, 0.32))
    )
    sea = sea * (0.75 + 0.5 * wave[..., None])
    glitter = np.exp(-(((x - 0.36) / (0.05 + 0.22 * deep)) ** 2)) * _smooth((wave - 0.52) * 7)
    sea = _mix(sea, (1.0, 0.92, 0.74), np.clip(glitter, 0, 1))
    picture = _mix(picture, sea, _step(y, horizon))
    sun = np.hypot(x - 0.36, y - 0.38)
    picture = _mix(picture, (1.0, 0.95, 0.80), np.exp(-sun * 9) * 0.8 * (1 - _step(y, horizon)))
    sand = 1.06 + 0.05 * np.sin(x * 4) + 0.02 * _noise(x, y, 23)
    beach = _fill((0.80, 0.66, 0.48)) * (0.82 + 0.3 * _noise(x * 9, y * 9, 24)[..., None])
    picture = _mix(picture, (0.96, 0.95, 0.92), _step(y, sand - 0.03, 0.03))
    return _grain(_mix(picture, beach, _step(y, sand, 0.01)), 2, 0.012)


def _lit_ball(
    picture: Picture, centre: tuple[float, float], radius: float, colour: Colour
) -> Picture:
    """Draws a ball with light from the upper left and a shadow on the table."""
    x, y = _grid()
    u, v = (x - centre[0]) / radius, (y - centre[1]) / radius
    shadow = np.exp(-(((u - 0.55) / 1.15) ** 2 + ((v - 0.95) / 0.30) ** 2) * 1.6)
    picture = picture * (1 - 0.75 * np.clip(shadow, 0, 1)[..., None])
    flat = u * u + v * v
    depth = np.sqrt(np.clip(1 - flat, 0, 1))
    light = np.clip(-0.50 * u - 0.62 * v + 0.60 * depth, 0, 1)
    shine = np.clip(-0.42 * u - 0.52 * v + 0.74 * depth, 0, 1) ** 48
    rim = (1 - depth) ** 3 * np.clip(v + 0.4, 0, 1)
    ball = (
        np.float32(colour) * (0.14 + 0.96 * light[..., None])
        + 0.16 * rim[..., None]
        + 0.85 * shine[..., None]
    )
    return _mix(picture, ball, 1 - _step(np.sqrt(flat), 1.0, 0.012))


def still_life() -> Picture:
    """Draws fruit on a table."""
    x, y = _grid()
    wall = _gradient(y, (0.0, (0.30, 0.34, 0.33)), (0.8, (0.52, 0.52, 0.46)))
    wall *= (0.75 + 0.5 * np.exp(-np.hypot(x - 0.2, y - 0.3) * 2))[..., None]
    table = _gradient(y, (0.76, (0.42, 0.27, 0.17)), (1.25, (0.24, 0.14, 0.09)))
    table *= (0.8 + 0.4 * _noise(x * 1.2, y * 14, 31))[..., None]
    picture = _mix(wall, table, _step(y, 0.76, 0.006))
    picture = _lit_ball(picture, (0.66, 0.66), 0.205, (0.93, 0.60, 0.12))
    picture = _lit_ball(picture, (0.34, 0.72), 0.175, (0.74, 0.13, 0.12))
    picture = _lit_ball(picture, (0.56, 0.91), 0.130, (0.42, 0.56, 0.14))
    picture = _lit_ball(picture, (0.20, 0.96), 0.075, (0.36, 0.12, 0.36))
    picture = _lit_ball(picture, (0.325, 1.02), 0.072, (0.30, 0.10, 0.33))
    return _grain(picture, 3, 0.015)


def city() -> Picture:
    """Draws lit windows at night, reflected in water."""
    _, y = _grid()
    picture = _gradient(
        y, (0.0, (0.04, 0.06, 0.15)), (0.6, (0.20, 0.16, 0.33)), (0.82, (0.62, 0.33, 0.36))
    )
    random = np.random.default_rng(41)
    stars = random.random((HEIGHT, WIDTH)) > 0.9988
    picture = _mix(picture, (0.9, 0.9, 1.0), stars * np.clip(0.6 - y, 0, 1))
    for row in range(3):
        edge = 0.0
        while edge < 1:
            width, roof = random.uniform(0.06, 0.13), random.uniform(0.36, 0.68) + 0.06 * row
            _house(picture, (edge, edge + width), roof, row, int(random.integers(1 << 30)))
            edge += width
    mirror = picture[: int(0.86 * WIDTH)][::-1]
    below = HEIGHT - int(0.86 * WIDTH)
    shift = (6 * np.sin(np.arange(below) * 0.35) * (1 + np.arange(below) / 80)).astype(int)
    water = np.stack([np.roll(mirror[line], shift[line], axis=0) for line in range(below)])
    picture[-below:] = water * 0.45 + np.float32((0.02, 0.03, 0.07))
    return _grain(picture, 4, 0.014)


def _house(picture: Picture, sides: tuple[float, float], roof: float, row: int, seed: int) -> None:
    columns = slice(round(sides[0] * WIDTH), round(min(sides[1], 1) * WIDTH))
    x, y = (axis[:, columns] for axis in _grid())
    inside = y >= roof
    wall = tuple(part * (1 - 0.3 * row) for part in (0.15, 0.13, 0.22))
    random = np.random.default_rng(seed).random((2, 80, 80))
    column, level = np.floor(x * 70).astype(int) % 80, np.floor(y * 52).astype(int) % 80
    is_lit = (random[0, level, column] > 0.62) & (x * 70 % 1 > 0.3) & (y * 52 % 1 > 0.38)
    warm = random[1, level, column]
    light = np.stack([0.96 - 0 * warm, 0.66 + 0.26 * warm, 0.32 + 0.44 * warm], axis=-1)
    strip = np.where(inside[..., None], np.float32(wall), picture[:, columns])
    picture[:, columns] = np.where((inside & is_lit)[..., None], light, strip)


def forest() -> Picture:
    """Draws birches in the fog."""
    x, y = _grid()
    picture = _gradient(
        y, (0.0, (0.80, 0.83, 0.74)), (0.8, (0.66, 0.70, 0.55)), (1.25, (0.30, 0.34, 0.20))
    )
    random = np.random.default_rng(51)
    for number in range(26):
        near, middle, lean = number / 25, random.uniform(-0.02, 1.02), random.uniform(-0.05, 0.05)
        _birch(picture, middle, lean, near, 60 + number)
    leaves = _smooth((_noise(x * 3, y * 3, 53) - 0.50) * 5) * np.clip(0.55 - y, 0, 1) * 1.6
    picture = _mix(picture, (0.74, 0.66, 0.20), np.clip(leaves, 0, 0.85))
    return _grain(picture, 5, 0.016)


def _birch(picture: Picture, middle: float, lean: float, near: float, seed: int) -> None:
    """Draws a birch. Near birches are thicker, longer and less foggy."""
    width, reach = 0.010 + 0.042 * near**2, 0.07
    columns = slice(max(0, int((middle - reach) * WIDTH)), max(1, int((middle + reach) * WIDTH)))
    x, y = (axis[:, columns] for axis in _grid())
    at = x - middle - lean * (y - 0.6)
    bark = 0.78 - 0.34 * np.clip(at / width + 0.2, 0, 1)
    marks = _smooth((_noise(x * 3, y * 26, seed, 3) - 0.60) * 12)
    fog = 0.78 * (1 - near)
    behind = picture[:, columns]
    tree = np.float32((1.0, 0.97, 0.90)) * (bark * (1 - 0.75 * marks))[..., None]
    foot = 0.86 + 0.34 * near + 0.02 * _noise(x * 4, y * 4, 52, 2)
    share = _step(width / 2 - np.abs(at), 0.0, 0.003) * (1 - _step(y, foot, 0.02))
    picture[:, columns] = _mix(behind, tree * (1 - fog) + behind * fog, share)


def dunes() -> Picture:
    """Draws sand dunes with light from the side."""
    x, y = _grid()
    picture = _gradient(y, (0.0, (0.34, 0.55, 0.74)), (0.45, (0.86, 0.82, 0.74)))
    uneven = 6 * _noise(x * 2, y * 2, 71, 3)
    for number in range(5):
        near = number / 4
        crest = (
            0.40
            + 0.15 * number
            + 0.07 * np.sin(x * (2.2 + number) + number * 1.9)
            - 0.05 * near * x
        )
        side = np.cos(x * (2.2 + number) + number * 1.9)
        light = 0.72 + 0.26 * side - 0.35 * np.clip(y - crest, 0, 0.5)
        ripple = 0.05 * np.sin((y + 0.12 * np.sin(x * 5)) * (150 - 80 * near) + uneven)
        sand = np.float32((0.93, 0.66, 0.40)) * (light + ripple)[..., None]
        sand = sand * (0.72 + 0.28 * near) + np.float32((0.86, 0.82, 0.74)) * (0.28 - 0.28 * near)
        picture = _mix(picture, sand, _step(y, crest, 0.004))
    return _grain(picture, 6, 0.014)


def flower() -> Picture:
    """Draws a dahlia, seen from above."""
    x, y = _grid()
    u, v = x - 0.5, y - 0.6
    radius, angle = np.hypot(u, v), np.arctan2(v, u)
    picture = _fill((0.07, 0.14, 0.10)) * (0.55 + 0.9 * _noise(x * 2, y * 2, 81)[..., None])
    for ring in range(9):
        reach = 0.47 - 0.048 * ring
        petals = 17 - ring
        wave = np.abs(np.cos(angle * petals / 2 + ring * 0.9))
        edge = reach * (0.72 + 0.28 * wave**0.6)
        along = np.clip(radius / edge, 0, 1)
        shade = 0.42 + 0.58 * wave**0.8 * (0.45 + 0.55 * along)
        pink = _gradient(along, (0.0, (0.52, 0.04, 0.20)), (1.0, (0.97, 0.46 + 0.03 * ring, 0.52)))
        picture = picture * (1 - 0.45 * np.clip(1 - np.abs(radius - edge) * 30, 0, 1)[..., None])
        picture = _mix(picture, pink * shade[..., None], _step(edge, radius, 0.004))
    return _grain(picture, 7, 0.014)


def balloons() -> Picture:
    """Draws balloons over hills in the morning."""
    x, y = _grid()
    picture = _gradient(y, (0.0, (0.38, 0.62, 0.84)), (0.9, (0.97, 0.88, 0.74)))
    picture = _mix(picture, (1, 1, 1), np.clip((_noise(x * 1.2, y * 2.5, 91) - 0.52) * 3, 0, 0.8))
    for number, colour in enumerate(((0.40, 0.56, 0.52), (0.27, 0.44, 0.33), (0.16, 0.30, 0.18))):
        line = 0.98 + 0.09 * number - 0.09 * _noise(x[:1] * 0.7 + number, np.float32(number), 92)
        picture = _mix(picture, colour, _step(y, line, 0.004))
    stripes = (
        ((0.86, 0.20, 0.16), (0.98, 0.83, 0.36)),
        ((0.16, 0.32, 0.58), (0.95, 0.94, 0.90)),
        ((0.95, 0.56, 0.16), (0.52, 0.16, 0.30)),
    )
    for (centre, size), (first, second) in zip(
        (((0.36, 0.40), 0.235), ((0.78, 0.58), 0.135), ((0.66, 0.20), 0.085)), stripes, strict=True
    ):
        picture = _balloon(picture, centre, size, first, second)
    return _grain(picture, 8, 0.012)


def _balloon(
    picture: Picture, centre: tuple[float, float], size: float, first: Colour, second: Colour
) -> Picture:
    x, y = _grid()
    u, v = (x - centre[0]) / size, (y - centre[1]) / size
    narrow = np.where(v > 0, 1 - 0.52 * np.clip(v, 0, 1.2) ** 2, 1)
    inside = _step(1 - (u / narrow) ** 2 - np.where(v > 0, v / 1.22, v) ** 2, 0.0, 0.02)
    bend = np.arcsin(
        np.clip(
            u / np.maximum(narrow * np.sqrt(np.clip(1 - (v / 1.25) ** 2, 0.02, 1)), 0.05), -1, 1
        )
    )
    stripe = _step(np.sin(bend * 7), 0.0, 0.12)
    skin = _mix(_fill(first), second, stripe) * (0.92 - 0.42 * u - 0.12 * v)[..., None]
    basket = (np.abs(u) < 0.10) & (v > 1.38) & (v < 1.56)
    ropes = (np.abs(np.abs(u) - (0.10 + 0.16 * (1.38 - v))) < 0.012) & (v > 1.0) & (v < 1.4)
    picture = _mix(picture, (0.25, 0.16, 0.09), (basket | ropes).astype(np.float32))
    return _mix(picture, skin, inside)


SCENES: Mapping[str, Callable[[], Picture]] = {
    "ridges": ridges,
    "shore": shore,
    "still-life": still_life,
    "city": city,
    "forest": forest,
    "dunes": dunes,
    "flower": flower,
    "balloons": balloons,
}


def clip(picture: Picture) -> bytes:
    """Returns an MP4 clip that pans and zooms slowly over an image."""
    target = io.BytesIO()
    whole = _image(picture)
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(CLIP_FPS))
        stream.width, stream.height = CLIP_SIZE
        stream.pix_fmt = "yuv420p"
        for number in range(CLIP_FRAMES):
            part = number / (CLIP_FRAMES - 1)
            width = int(WIDTH * (1 - 0.35 * part))
            x, y = int((WIDTH - width) * 0.3), int((HEIGHT - width * 5 // 4) * 0.45)
            shown = whole.crop((x, y, x + width, y + width * 5 // 4)).resize(CLIP_SIZE)
            container.mux(stream.encode(av.VideoFrame.from_image(shown)))
        container.mux(stream.encode())
    return target.getvalue()
