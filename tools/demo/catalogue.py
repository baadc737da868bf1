"""The demo's workflows and effects. The prompts only use nodes of the built-in engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Prompt: TypeAlias = dict[str, dict[str, Any]]
LARGE_FORMAT = "large-format"  # a capability that only the studio's workers have
SAVED = {"filename_prefix": "comfyfleet"}
PHOTO = {"name": "input", "type": "image", "binding": "1.image", "label": "Photo"}
MISSING_MODEL = "portrait-oil-xl.safetensors"


@dataclass(frozen=True)
class Shown:
    """A workflow, the effect that uses it, and the scenes of the effect's examples."""

    slug: str
    title: str
    description: str
    price_tokens: int
    tags: tuple[str, ...]
    prompt: Prompt
    properties: tuple[Mapping[str, Any], ...]
    scenes: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    is_video: bool = False
    media_types: tuple[str, ...] = ("image/jpeg", "image/png", "image/webp")
    for_example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes_mask(self) -> bool:
        return any(prop.get("format") == "mask" for prop in self.properties)


def node(class_type: str, title: str | None = None, **inputs: Any) -> dict[str, Any]:
    named = {"_meta": {"title": title}} if title else {}
    return {"class_type": class_type, "inputs": inputs, **named}


def prompt(*nodes: dict[str, Any]) -> Prompt:
    """Returns a prompt. The ids of its nodes count from 1."""
    return {str(number): node for number, node in enumerate(nodes, start=1)}


def load() -> dict[str, Any]:
    return node("LoadImage", "Photo", image="photo.png")


def save(source: list[Any]) -> dict[str, Any]:
    return node("SaveImage", "Result", images=source, **SAVED)


def number(name: str, binding: str, label: str, default: float, low: float, high: float, step: float = 0.05) -> dict[str, Any]:  # fmt: skip
    kind = "integer" if isinstance(default, int) else "number"
    return {"name": name, "type": kind, "binding": binding, "label": label, "default": default, "minimum": low, "maximum": high, "step": step}  # fmt: skip


def colour(name: str, binding: str, label: str, default: int) -> dict[str, Any]:
    return {"name": name, "type": "integer", "format": "colour", "binding": binding, "label": label, "default": default, "minimum": 0, "maximum": 0xFFFFFF}  # fmt: skip


def choice(name: str, binding: str, label: str, default: str, *choices: str) -> dict[str, Any]:
    return {"name": name, "type": "choice", "binding": binding, "label": label, "default": default, "choices": list(choices)}  # fmt: skip


def seed(binding: str) -> dict[str, Any]:
    return {"name": "seed", "type": "seed", "binding": binding, "label": "Seed"}


def _coloured(mode: str, factor: float, tone: int) -> tuple[dict[str, Any], ...]:
    """Returns nodes 1 to 4, which blend a photo with a single color."""
    return (
        load(),
        node("GetImageSize", "Size", image=["1", 0]),
        node("EmptyImage", "Color", width=["2", 0], height=["2", 1], batch_size=1, color=tone),
        node("ImageBlend", "Blend", image1=["1", 0], image2=["3", 0], blend_factor=factor, blend_mode=mode),
    )  # fmt: skip


GOLDEN = Shown(
    "golden-hour", "Golden hour", "Warm evening light for any photo.", 4, ("light", "color"),
    prompt(
        *_coloured("soft_light", 0.85, 0xFF9A3C),
        node("AdjustContrast", "Contrast", images=["4", 0], factor=1.08),
        node("AdjustBrightness", "Brightness", images=["5", 0], factor=1.06),
        save(["6", 0]),
    ),
    (PHOTO, colour("light", "3.color", "Light", 0xFF9A3C), number("strength", "4.blend_factor", "Strength", 0.85, 0.0, 1.0)),
    ("dunes", "ridges"),
)  # fmt: skip
MOONLIGHT = Shown(
    "moonlight", "Moonlight", "Turns day into night.", 4, ("light", "color"),
    prompt(
        *_coloured("multiply", 1.0, 0x5068B0),
        node("AdjustBrightness", "Darker", images=["4", 0], factor=0.78),
        node("AdjustContrast", "Contrast", images=["5", 0], factor=1.2),
        save(["6", 0]),
    ),
    (PHOTO, colour("sky", "3.color", "Night color", 0x5068B0), number("darkness", "5.factor", "Remaining light", 0.78, 0.2, 1.0)),
    ("balloons", "shore"),
)  # fmt: skip
SCREEN_PRINT = Shown(
    "screen-print", "Screen print", "A print with few colors and a dot pattern.", 3, ("print",),
    prompt(
        load(),
        node("ImageScaleBy", "Coarse", image=["1", 0], upscale_method="area", scale_by=0.5),
        node("AdjustContrast", "Contrast", images=["2", 0], factor=1.25),
        node("ImageQuantize", "Inks", image=["3", 0], colors=6, dither="bayer-4"),
        node("ImageScaleBy", "Print", image=["4", 0], upscale_method="nearest-exact", scale_by=2.0),
        save(["5", 0]),
    ),
    (PHOTO, number("inks", "4.colors", "Inks", 6, 2, 32, 1), choice("pattern", "4.dither", "Pattern", "bayer-4", "none", "floyd-steinberg", "bayer-2", "bayer-4", "bayer-8")),
    ("still-life", "flower"),
)  # fmt: skip
SOFT_FOCUS = Shown(
    "soft-focus", "Soft focus", "A soft glow like that of an old portrait lens.", 3, ("light",),
    prompt(
        load(),
        node("ImageBlur", "Glow", image=["1", 0], blur_radius=18, sigma=7.0),
        node("ImageBlend", "Blend", image1=["1", 0], image2=["2", 0], blend_factor=0.6, blend_mode="screen"),
        node("AdjustContrast", "Contrast", images=["3", 0], factor=1.1),
        save(["4", 0]),
    ),
    (PHOTO, number("glow", "3.blend_factor", "Glow", 0.6, 0.0, 1.0), number("radius", "2.blur_radius", "Softness", 18, 1, 31, 1)),
    ("flower", "forest"),
)  # fmt: skip
FILM = Shown(
    "black-and-white", "Black and white film", "Grainy black and white with high contrast.", 2, ("film",),
    prompt(
        load(),
        node("ImageToMask", "Filter", image=["1", 0], channel="red"),
        node("MaskToImage", "Gray", mask=["2", 0]),
        node("AdjustContrast", "Contrast", images=["3", 0], factor=1.35),
        node("ImageAddNoise", "Grain", image=["4", 0], seed=7, strength=0.1),
        save(["5", 0]),
    ),
    (PHOTO, choice("filter", "2.channel", "Lens filter", "red", "red", "green", "blue"), number("grain", "5.strength", "Grain", 0.1, 0.0, 0.5), seed("5.seed")),
    ("forest", "city"),
)  # fmt: skip
PENCIL = Shown(
    "pencil", "Pencil drawing", "Outlines on white paper.", 3, ("print",),
    prompt(
        load(),
        node("ImageToMask", "Gray", image=["1", 0], channel="green"),
        node("MaskToImage", "Gray image", mask=["2", 0]),
        node("ImageBlur", "Surroundings", image=["3", 0], blur_radius=9, sigma=4.0),
        node("ImageBlend", "Differences", image1=["3", 0], image2=["4", 0], blend_factor=1.0, blend_mode="difference"),
        node("AdjustBrightness", "Pressure", images=["5", 0], factor=2.0),
        node("AdjustBrightness", "Pencil softness", images=["6", 0], factor=2.0),
        node("ImageInvert", "Paper", image=["7", 0]),
        save(["8", 0]),
    ),
    (PHOTO, number("pressure", "6.factor", "Pressure", 2.0, 0.5, 2.0), number("width", "4.blur_radius", "Line width", 9, 2, 31, 1)),
    ("balloons", "still-life"),
)  # fmt: skip
STILL_WATER = Shown(
    "still-water", "Still water", "The upper half of a photo, reflected in water.", 3, ("place",),
    prompt(
        load(),
        node("GetImageSize", "Size", image=["1", 0]),
        node("ComfyMathExpression", "Half", expression="floor(a / 2)", **{"values.a": ["2", 1]}),
        node("ImageCrop", "Upper half", image=["1", 0], width=["2", 0], height=["3", 1], x=0, y=0),
        node("ImageFlip", "Reflection", image=["4", 0], flip_method="x-axis: vertically"),
        node("ImageBlur", "Water", image=["5", 0], blur_radius=4, sigma=2.0),
        node("AdjustBrightness", "Depth", images=["6", 0], factor=0.7),
        node("ImageStitch", "Shore", image1=["4", 0], image2=["7", 0], direction="down", match_image_size=True, spacing_width=0, spacing_color="black"),
        save(["8", 0]),
    ),
    (PHOTO, number("depth", "7.factor", "Light on the water", 0.7, 0.1, 1.0), number("waves", "6.blur_radius", "Waves", 4, 1, 31, 1)),
    ("ridges", "balloons"),
)  # fmt: skip
PIXELS = Shown(
    "pixels", "Pixels", "Looks like a computer screen from 1985.", 2, ("print",),
    prompt(
        load(),
        node("GetImageSize", "Size", image=["1", 0]),
        node("ImageScaleToMaxDimension", "Screen", image=["1", 0], upscale_method="area", largest_size=80),
        node("ImageQuantize", "Palette", image=["3", 0], colors=16, dither="none"),
        node("ImageScale", "Enlarged", image=["4", 0], upscale_method="nearest-exact", width=["2", 0], height=["2", 1], crop="disabled"),
        save(["5", 0]),
    ),
    (PHOTO, number("pixels", "3.largest_size", "Pixels on the longer side", 80, 16, 320, 1), number("palette", "4.colors", "Colors", 16, 2, 64, 1)),
    ("flower", "ridges"),
)  # fmt: skip
INSTANT = Shown(
    "instant-photo", "Instant photo", "A white frame with room for a caption.", 2, ("film",),
    prompt(
        load(),
        node("ImageScale", "Picture", image=["1", 0], upscale_method="area", width=560, height=600, crop="center"),
        node("EmptyImage", "Frame", width=640, height=800, batch_size=1, color=0xF7F5F0),
        node("ImageCompositeMasked", "Mounted", destination=["3", 0], source=["2", 0], x=40, y=40, resize_source=False),
        save(["4", 0]),
    ),
    (PHOTO, colour("frame", "3.color", "Frame", 0xF7F5F0)),
    ("shore", "dunes"),
)  # fmt: skip
VEIL = Shown(
    "veil", "Veil", "Hides the area that you paint over.", 3, ("place",),
    prompt(
        load(),
        node("LoadImageMask", "Painted", image="mask.png", channel="red"),
        node("GetImageSize", "Size", image=["1", 0]),
        node("ImageScaleBy", "Coarse", image=["1", 0], upscale_method="area", scale_by=0.04),
        node("ImageScale", "Veil", image=["4", 0], upscale_method="bicubic", width=["3", 0], height=["3", 1], crop="disabled"),
        node("ImageCompositeMasked", "Behind the veil", destination=["1", 0], source=["5", 0], x=0, y=0, resize_source=False, mask=["2", 0]),
        save(["6", 0]),
    ),
    (PHOTO, {"name": "area", "type": "image", "format": "mask", "binding": "2.image", "label": "Area to hide", "required": True}),
    ("city", "still-life"),
)  # fmt: skip
NEGATIVE_FILM = Shown(
    "negative-film", "Negative film", "Turns a clip into a film negative.", 10, ("film", "video"),
    prompt(
        node("LoadVideo", "Clip", file="clip.mp4"),
        node("GetVideoComponents", "Images and sound", video=["1", 0]),
        node("ImageInvert", "Negative", image=["2", 0]),
        node("AdjustContrast", "Contrast", images=["3", 0], factor=1.1),
        node("CreateVideo", "New clip", images=["4", 0], fps=["2", 2], audio=["2", 1]),
        node("SaveVideo", "Result", video=["5", 0], filename_prefix="video/comfyfleet", format="auto", codec="auto"),
    ),
    ({"name": "input", "type": "video", "binding": "1.file", "label": "Clip"}, number("contrast", "4.factor", "Contrast", 1.1, 0.5, 2.0)),
    ("shore",), is_video=True, media_types=("video/mp4", "video/webm", "video/quicktime"),
)  # fmt: skip
ENLARGE = Shown(
    "large-format", "Large format", "Doubles the size of a photo step by step. This takes a few minutes on the studio's worker.", 25, ("print",),
    prompt(
        load(),
        node("ComfyfleetSteps", "Processing", image=["1", 0], steps=150, step_ms=1_000, previews=True),
        node("ImageScaleBy", "Enlarged", image=["2", 0], upscale_method="lanczos", scale_by=2.0),
        node("ImageSharpen", "Sharp", image=["3", 0], sharpen_radius=2, sigma=1.0, alpha=0.6),
        save(["4", 0]),
    ),
    (PHOTO, number("steps", "2.steps", "Steps", 150, 1, 600, 1), number("sharpness", "4.alpha", "Sharpness", 0.6, 0.0, 2.0)),
    ("ridges",), capabilities=(LARGE_FORMAT,), for_example={"steps": 8},
)  # fmt: skip
PORTRAIT_LIGHT = Shown(
    "portrait-light", "Portrait light", "Improves the light on a face. The demo's photos have no faces, so the jobs of this effect fail.", 5, ("light",),
    prompt(
        load(),
        node("ComfyfleetFail", "Find the face", value=["1", 0], fail=True, message="No face was found in this photo.", after_ms=400),
        node("AdjustBrightness", "Light", images=["2", 0], factor=1.5),
        save(["3", 0]),
    ),
    (PHOTO, {"name": "needs_a_face", "type": "boolean", "binding": "2.fail", "label": "Needs a face", "default": True}),
    ("still-life",), for_example={"needs_a_face": False},
)  # fmt: skip
# The first effect is the largest card in the catalog.
EFFECTS = (
    GOLDEN, SCREEN_PRINT, STILL_WATER, SOFT_FOCUS, PENCIL, NEGATIVE_FILM, MOONLIGHT, FILM, PIXELS, INSTANT, VEIL, ENLARGE, PORTRAIT_LIGHT,
)  # fmt: skip

# Registered without an effect, because no worker has its model.
OIL_PORTRAIT = prompt(
    node("CheckpointLoaderSimple", "Painter", ckpt_name=MISSING_MODEL),
    node("PreviewAny", "Model", source=["1", 0]),
)

# Only offered to pipelines and graphs. The seed determines the color.
TINT_PROPERTIES = (PHOTO, number("seed", "5.value", "Seed", 1, 0, 2**31 - 1, 1), number("strength", "4.blend_factor", "Strength", 0.8, 0.0, 1.0))  # fmt: skip
TINT_PROMPT = prompt(
    load(),
    node("GetImageSize", "Size", image=["1", 0]),
    node("EmptyImage", "Color", width=["2", 0], height=["2", 1], batch_size=1, color=["6", 1]),
    node("ImageBlend", "Tint", image1=["1", 0], image2=["3", 0], blend_factor=0.8, blend_mode="overlay"),
    node("PrimitiveInt", "Seed", value=1),
    node("ComfyMathExpression", "Color", expression="(a * 7919) % 16777216", **{"values.a": ["5", 0]}),
    save(["4", 0]),
)  # fmt: skip

PIPELINE = {
    "name": "Posters from a photo",
    "steps": [
        {"name": "Tint", "workflow": "tint", "properties": {"input": "{{ variables.photo }}", "seed": "{{ seed }}"}, "needs_approval": True},
        {"name": "Print", "effect": "screen-print", "properties": {"input": "{{ parent.file }}", "inks": 5}, "children_per_parent": 2, "keep": 3},
        {"name": "Frame", "effect": "instant-photo", "properties": {"input": "{{ parent.file }}"}},
    ],
}  # fmt: skip


def _step(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "type": "workflow", **fields}


def _link(source: str, target: str) -> dict[str, str]:
    return {"from": source, "to": target}


THREE_PRINTS = {
    "name": "Three prints from a photo",
    "nodes": [
        {"id": "photo", "type": "input", "value_type": "image"},
        {"id": "copies", "type": "fanout", "mode": "broadcast", "output_count": 3},
        _step("golden", effect="golden-hour", retries=1),
        _step("print", effect="screen-print", properties={"inks": 8}),
        _step("drawing", effect="pencil"),
        {"id": "sheet", "type": "merge", "mode": "concat_images"},
        {"id": "prints", "type": "output"},
    ],
    "connections": [
        _link("photo.value", "copies.input"),
        *(_link(f"copies.output_{number}", f"{name}.input") for number, name in enumerate(("golden", "print", "drawing"))),
        *(_link(f"{name}.output", f"sheet.input_{number}") for number, name in enumerate(("golden", "print", "drawing"))),
        _link("sheet.output.images", "prints.value"),
    ],
}  # fmt: skip
LARGE_PRINT = {
    "name": "Large print",
    "nodes": [
        {"id": "photo", "type": "input", "value_type": "image"},
        _step("softer", effect="soft-focus", properties={"glow": 0.4}),
        {"id": "is_large", "type": "condition", "condition": "output.width >= 512 AND output.images.count > 0"},
        _step("enlarged", effect="large-format", properties={"steps": 20}, backend_affinity="worker:studio-2", fallback_strategy="ask_user"),
        _step("framed", effect="instant-photo"),
        {"id": "either", "type": "merge", "mode": "concat_images"},
        {"id": "print", "type": "output"},
    ],
    "connections": [
        _link("photo.value", "softer.input"),
        _link("softer.output", "is_large.input"),
        _link("is_large.true", "enlarged.input"),
        _link("is_large.false", "framed.input"),
        _link("enlarged.output", "either.input_0"),
        _link("framed.output", "either.input_1"),
        _link("either.output.images", "print.value"),
    ],
}  # fmt: skip
WITH_A_FACE = {
    "name": "Portrait, then print",
    "nodes": [
        {"id": "photo", "type": "input", "value_type": "image"},
        _step("light", effect="portrait-light"),
        _step("framed", effect="instant-photo"),
        {"id": "print", "type": "output"},
    ],
    "connections": [_link("photo.value", "light.input"), _link("light.output", "framed.input"), _link("framed.output.images", "print.value")],
}  # fmt: skip
