"""Workflows built as a chain of segments, in the ways that people build them, of any length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from tests.unit.drawn import Drawing, Output, port

STEP = 1000.0  # from one segment to the next on the canvas
OUTSIDE = 2000.0  # below all groups

Place = Literal["inside", "outside", "nowhere"]


class Style(NamedTuple):
    """How a chain of groups is built, and what stands in the groups or outside of them."""

    title: str = "Extend {}"
    feeds_next: bool = True  # the last frame starts the next segment
    decode: Place = "inside"
    hand_over: Place = "inside"
    preview: Place = "inside"
    # Frames of all segments are joined: by each segment in or below its group, or by one node.
    join: Place | Literal["by one node"] = "inside"
    join_class: str = "ImageBatch"
    wires: bool = False  # the joined frames are handed on by Set and Get
    last_group_has_all: bool = False  # the saver, its frame rate, and a loader that all use
    tail: Literal["saved", "scaled", "matched"] = "saved"


class GroupChain:
    """Draws one segment after the other."""

    def __init__(self, count: int, style: Style) -> None:
        self.drawing = Drawing()
        self.style = style
        loader = self.drawing.node("CheckpointLoader", "video.ckpt", at=(-900, 0))
        self.model, self.clip, self.vae = (loader, 0), (loader, 1), (loader, 2)
        self.image: Output = self.drawing.node("LoadImage", "cat.png", at=(-900, 300)), 0
        if style.last_group_has_all:
            self.vae = self.drawing.node("VAELoader", "fine.vae", at=(count * STEP, 500)), 0
        start, film = self.image, self.handed_over(self.image, 0)
        parts: dict[str, Any] = {}
        for number in range(1, count + 1):
            images = self.new_frames(number, start)
            parts[f"image_{number}"] = images
            film = self.handed_over(self.joined(number, film, images), number)
            if style.feeds_next:
                start = self.at("hand_over", "ImageFromBatch", 15, y=400, of=number, image=images)
            if style.preview != "nowhere":
                self.at("preview", "PreviewImage", y=300, of=number, images=images)
        if style.join == "by one node" and count > 1:
            film = self.drawing.node("ImageBatchMulti", count, None, at=(0, OUTSIDE), **parts), 0
        self.finish(film, count)

    def at(self, part: str, kind: str, *values: Any, y: float, of: int, **links: Any) -> Output:
        """A node of a segment, inside or outside of its group."""
        below = OUTSIDE if getattr(self.style, part) == "outside" else 0
        return self.drawing.node(kind, *values, at=(of * STEP + 300, y + below), **links), 0

    def new_frames(self, number: int, start: Output) -> Output:
        left = number * STEP
        self.drawing.group(self.style.title.format(number), left - 50, -100, STEP - 100, 900)
        text = self.drawing.node("CLIPTextEncode", f"part {number}", at=(left, 0), clip=self.clip)
        begin = self.drawing.node(
            "ImageToVideo", at=(left, 200), positive=(text, 0), vae=self.vae, start_image=start
        )
        sampler = self.drawing.node(
            "KSampler", number, at=(left + 300, 0), model=self.model,
            positive=(begin, 0), latent_image=(begin, 1),
        )  # fmt: skip
        return self.at("decode", "VAEDecode", y=100, of=number, samples=(sampler, 0), vae=self.vae)

    def joined(self, number: int, film: Output, images: Output) -> Output:
        if self.style.join in ("nowhere", "by one node"):
            return images
        if self.style.join == "outside" and number == 1:
            return images  # one segment needs no joining
        names = ("image1", "image2")
        if self.style.join_class == "NewThenOld":
            names = ("old_images", "new_images")
        links = dict(zip(names, (film, images), strict=True))
        return self.at("join", self.style.join_class, y=200, of=number, **links)

    def handed_over(self, film: Output, number: int) -> Output:
        if not self.style.wires:
            return film
        place = (number * STEP + 600, 600)
        self.drawing.wire("SetNode", f"film_{number}", "IMAGE", film, at=place)
        getter = self.drawing.wire("GetNode", f"film_{number}", "IMAGE", at=(place[0] + STEP, 700))
        return self.drawing.wire("Reroute", "", "IMAGE", (getter, 0), at=place), 0

    def finish(self, film: Output, count: int) -> None:
        inside = self.style.last_group_has_all
        left, top = (count * STEP + 600, 0.0) if inside else (0.0, OUTSIDE)
        if self.style.tail == "scaled":
            film = self.drawing.node("ImageScale", 512, at=(left, top), image=film), 0
        if self.style.tail == "matched":
            film = (
                self.drawing.node(
                    "ColorMatch", at=(left, top), image_ref=self.image, image_target=film
                ),
                0,
            )
        rate = self.drawing.node("FrameRate", 24, at=(left, top + 200)), 0
        saver = self.drawing.node("SaveVideo", 0, "film", at=(left, top + 400), images=film)
        self.drawing.feed(saver, "fps", rate)


def by_groups(count: int, style: Style) -> dict[str, Any]:
    return GroupChain(count, style).drawing.workflow()


def by_titles(count: int) -> dict[str, Any]:
    """No groups: nodes are titled "Sampler 1", "Decode 1", "Save 1"."""
    drawing = Drawing()
    loader = drawing.node("CheckpointLoader", "video.ckpt")
    start = drawing.node("LoadImage", "cat.png"), 0
    for number in range(1, count + 1):
        text = drawing.node("CLIPTextEncode", f"part {number}", clip=(loader, 1))
        begin = drawing.node("ImageToVideo", positive=(text, 0), vae=(loader, 2), start_image=start)
        sampler = drawing.node(
            "KSampler", number, title=f"Sampler {number}",
            model=(loader, 0), positive=(begin, 0), latent_image=(begin, 1),
        )  # fmt: skip
        decode = drawing.node(
            "VAEDecode", title=f"Decode {number}", samples=(sampler, 0), vae=(loader, 2)
        )
        drawing.node("SaveImage", f"part {number}", title=f"Save {number}", images=(decode, 0))
        start = drawing.node("ImageFromBatch", 15, image=(decode, 0)), 0
    scaled = drawing.node("ImageScale", 512, image=start)
    drawing.node("SaveImage", "last", title="Thumbnail", images=(scaled, 0))
    return drawing.workflow()


def extender(name: str, number: int = 0) -> dict[str, Any]:
    """A definition that extends a film. The number tells copies of it apart."""
    inner = Drawing(
        first_id=1000 + 100 * number,
        inputs="frames:IMAGE model:MODEL clip:CLIP vae:VAE",
        outputs="last:IMAGE film:IMAGE",
    )
    last = inner.node("ImageFromBatch", 15, image=port(0))
    text = inner.node("CLIPTextEncode", f"part {number}", clip=port(2))
    begin = inner.node("ImageToVideo", positive=(text, 0), vae=port(3), start_image=(last, 0))
    sampler = inner.node(
        "KSampler", number, model=port(1), positive=(begin, 0), latent_image=(begin, 1)
    )
    decode = inner.node("VAEDecode", samples=(sampler, 0), vae=port(3))
    inner.node("PreviewImage", images=(decode, 0))
    film = inner.node("ImageBatch", image1=port(0), image2=(decode, 0))
    inner.outlet("last", (inner.node("ImageFromBatch", 16, image=(decode, 0)), 0))
    inner.outlet("film", (film, 0))
    return inner.definition(name)


def draw_instances(
    drawing: Drawing, count: int, shared: dict[str, Any], film: Output, *, own: bool
) -> tuple[Output, Output]:
    """The last frame and the film. A bypass would take one for the other."""
    last, common = film, extender("Extender")
    for number in range(1, count + 1):
        definition = extender(f"Clip {number}", number) if own else common
        title = "" if own else f"Extend ({number})"
        node = drawing.instance(definition, title=title, frames=film, **shared)
        last, film = (node, 0), (node, 1)
    return last, film


def by_instances(count: int, *, own: bool = False) -> dict[str, Any]:
    drawing = Drawing()
    loader = drawing.node("CheckpointLoader", "video.ckpt")
    shared = {"model": (loader, 0), "clip": (loader, 1), "vae": (loader, 2)}
    start = drawing.node("LoadImage", "cat.png"), 0
    last, film = draw_instances(drawing, count, shared, start, own=own)
    drawing.node("SaveVideo", 24, "film", images=film)
    drawing.node("SaveImage", "last", images=last)
    return drawing.workflow()


def in_a_subgraph(count: int) -> dict[str, Any]:
    """The chain is inside a definition, and leads out of it."""
    inner = Drawing(
        first_id=100,
        inputs="start:IMAGE model:MODEL clip:CLIP vae:VAE",
        outputs="film:IMAGE last:IMAGE",
    )
    shared = {"model": port(1), "clip": port(2), "vae": port(3)}
    last, film = draw_instances(inner, count, shared, port(0), own=False)
    inner.outlet("film", film)
    inner.outlet("last", last)
    drawing = Drawing()
    loader = drawing.node("CheckpointLoader", "video.ckpt")
    start = drawing.node("LoadImage", "cat.png"), 0
    node = drawing.instance(
        inner.definition("All of it"),
        start=start, model=(loader, 0), clip=(loader, 1), vae=(loader, 2),
    )  # fmt: skip
    drawing.definitions.extend(inner.definitions)
    drawing.node("SaveVideo", 24, "film", images=(node, 0))
    drawing.node("SaveImage", "last", images=(node, 1))
    return drawing.workflow()


STYLES = {
    "running join": Style(),
    "running join, new frames first": Style(title="Segment_{:02d}", join_class="NewThenOld"),
    "joined below the groups": Style(title="Part #{}", join="outside", preview="outside"),
    "shots joined by one node": Style(title="Shot {}", feeds_next=False, join="by one node"),
    "decoded below the groups": Style(decode="outside", hand_over="outside", join="outside"),
    "only the last frames are saved": Style(join="nowhere", preview="outside", tail="scaled"),
    "handed on by wires": Style(title="Extend {}: a day at sea", wires=True, tail="matched"),
    "all in the groups": Style(last_group_has_all=True),
}
CHAINS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{name: partial(by_groups, style=style) for name, style in STYLES.items()},
    "titles": by_titles,
    "instances of one definition": by_instances,
    "instances of their own": partial(by_instances, own=True),
    "in a subgraph": in_a_subgraph,
}
