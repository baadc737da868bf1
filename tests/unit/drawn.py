"""Draws small workflows as the editor saves them, over a few node classes of our own."""

from __future__ import annotations

from typing import Any
from zlib import crc32

Output = tuple[int, int]  # node id and slot


def _class(
    outputs: str = "", *, output_node: bool = False, optional: str = "", **required: Any
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "input": {
            "required": {
                name: spec if isinstance(spec, list) else [spec] for name, spec in required.items()
            }
        },
        "output": outputs.split(),
        "output_node": output_node,
    }
    if optional:
        entry["input"]["optional"] = {name: ["IMAGE"] for name in optional.split()}
    entry["input_order"] = {key: list(inputs) for key, inputs in entry["input"].items()}
    return entry


SEED = ["INT", {"default": 0}]
TEXT = ["STRING", {"default": ""}]

OBJECT_INFO: dict[str, Any] = {
    "CheckpointLoader": _class("MODEL CLIP VAE", ckpt_name=TEXT),
    "VAELoader": _class("VAE", vae_name=TEXT),
    "LoadImage": _class("IMAGE", image=TEXT),
    "LoraLoader": _class("MODEL", model="MODEL", lora_name=TEXT),
    "CLIPTextEncode": _class("CONDITIONING", clip="CLIP", text=TEXT),
    "ImageToVideo": _class(
        "CONDITIONING LATENT", positive="CONDITIONING", vae="VAE", start_image="IMAGE"
    ),
    "KSampler": _class(
        "LATENT", model="MODEL", positive="CONDITIONING", latent_image="LATENT", seed=SEED
    ),
    "VAEDecode": _class("IMAGE", samples="LATENT", vae="VAE"),
    "ImageFromBatch": _class("IMAGE", image="IMAGE", batch_index=SEED),
    "ImageScale": _class("IMAGE", image="IMAGE", width=SEED),
    "ColorMatch": _class("IMAGE", image_ref="IMAGE", image_target="IMAGE"),
    "ImageBatch": _class("IMAGE", image1="IMAGE", image2="IMAGE"),
    # Bypassed, this passes the new images on and loses the others.
    "NewThenOld": _class("IMAGE", new_images="IMAGE", old_images="IMAGE"),
    "ImageBatchMulti": _class(
        "IMAGE", optional="image_2", inputcount=["INT", {"default": 2}], image_1="IMAGE"
    ),
    "PreviewImage": _class("", output_node=True, images="IMAGE"),
    "SaveImage": _class("", output_node=True, images="IMAGE", filename_prefix=TEXT),
    "SaveVideo": _class(
        "", output_node=True, images="IMAGE", fps=SEED, filename_prefix=TEXT
    ),
    "FrameRate": _class("INT", value=SEED),
    "CountFrames": _class("INT", images="IMAGE"),
}  # fmt: skip


class Drawing:
    """One graph: the root graph or a subgraph definition."""

    def __init__(self, *, first_id: int = 1, inputs: str = "", outputs: str = "") -> None:
        """`inputs` and `outputs` are `name:TYPE`s of a definition."""
        self.nodes: list[dict[str, Any]] = []
        self.links: list[list[Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.definitions: list[dict[str, Any]] = []
        self._next = first_id
        self._ports = [_port(text) for text in inputs.split()]
        self._outlets = [_port(text) for text in outputs.split()]

    def node(
        self,
        class_name: str,
        *values: Any,
        title: str = "",
        mode: int = 0,
        at: tuple[float, float] = (0, 0),
        **links: Output,
    ) -> int:
        """Its id; `links` say by name which output feeds an input."""
        declared = _inputs_of(class_name, links)
        node = self._place(class_name, declared, OBJECT_INFO[class_name]["output"], mode, at)
        node["widgets_values"] = list(values)
        if title:
            node["title"] = title
        self._link(node, links)
        return int(node["id"])

    def instance(
        self,
        definition: dict[str, Any],
        *values: Any,
        title: str = "",
        mode: int = 0,
        at: tuple[float, float] = (0, 0),
        **links: Output,
    ) -> int:
        declared = {port["name"]: port["type"] for port in definition["inputs"]}
        outputs = [port["type"] for port in definition["outputs"]]
        node = self._place(definition["id"], declared, outputs, mode, at)
        node["widgets_values"] = list(values)
        if title:
            node["title"] = title
        if definition not in self.definitions:
            self.definitions.append(definition)
        self._link(node, links)
        return int(node["id"])

    def wire(
        self, kind: str, name: str, slot_type: str, source: Output | None = None, **place: Any
    ) -> int:
        """A Set or Get node; or a Reroute, whose name doesn't matter."""
        takes = {slot_type: slot_type} if kind != "GetNode" else {}
        node = self._place(kind, takes, [slot_type], 0, place.get("at", (0, 0)))
        node["widgets_values"] = [name]
        if source is not None:
            self._link(node, {slot_type: source})
        return int(node["id"])

    def feed(self, node: int, widget: str, source: Output) -> None:
        """Makes an input of a widget, as the editor does, and links it."""
        target = next(entry for entry in self.nodes if entry["id"] == node)
        link = self._add_link(source, node, len(target["inputs"]), "INT")
        target["inputs"].append(
            {"name": widget, "type": "INT", "widget": {"name": widget}, "link": link}
        )

    def group(self, title: str, left: float, top: float, width: float, height: float) -> None:
        self.groups.append({"title": title, "bounding": [left, top, width, height]})

    def outlet(self, name: str, source: Output) -> None:
        """Feeds an output of the definition."""
        slot = [port["name"] for port in self._outlets].index(name)
        self._outlets[slot]["linkIds"].append(self._add_link(source, -20, slot, "*"))

    def workflow(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "last_node_id": self._next - 1, "last_link_id": len(self.links),
            "nodes": self.nodes, "links": self.links, "groups": self.groups, "version": 0.4,
        }  # fmt: skip
        if self.definitions:
            document["definitions"] = {"subgraphs": self.definitions}
        return document

    def definition(self, name: str) -> dict[str, Any]:
        keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
        return {
            "id": f"00000000-0000-4000-8000-{crc32(name.encode()):012d}", "name": name,
            "inputs": self._ports, "outputs": self._outlets, "nodes": self.nodes,
            "links": [dict(zip(keys, link, strict=True)) for link in self.links],
            "groups": self.groups,
            "inputNode": {"id": -10, "bounding": [-400, 0, 120, 60]},
            "outputNode": {"id": -20, "bounding": [1400, 0, 120, 60]},
        }  # fmt: skip

    def _place(
        self,
        kind: str,
        inputs: dict[str, str],
        outputs: list[str],
        mode: int,
        at: tuple[float, float],
    ) -> dict[str, Any]:
        node = {
            "id": self._next, "type": kind, "pos": list(at), "size": [200, 70], "mode": mode,
            "flags": {}, "properties": {},
            "inputs": [{"name": name, "type": kind, "link": None} for name, kind in inputs.items()],
            "outputs": [{"name": kind, "type": kind, "links": []} for kind in outputs],
        }  # fmt: skip
        self._next += 1
        self.nodes.append(node)
        return node

    def _link(self, node: dict[str, Any], links: dict[str, Output]) -> None:
        for slot, entry in enumerate(node["inputs"]):
            if entry["name"] in links:
                source = links[entry["name"]]
                entry["link"] = self._add_link(source, node["id"], slot, entry["type"])

    def _add_link(self, source: Output, target: int, slot: int, slot_type: str) -> int:
        number = len(self.links) + 1
        self.links.append([number, source[0], source[1], target, slot, slot_type])
        if source[0] == -10:
            self._ports[source[1]]["linkIds"].append(number)
        else:
            origin = next(node for node in self.nodes if node["id"] == source[0])
            origin["outputs"][source[1]]["links"].append(number)
        return number


def port(slot: int) -> Output:
    """An input of the definition that is being drawn."""
    return -10, slot


def _port(text: str) -> dict[str, Any]:
    name, slot_type = text.split(":")
    return {"id": f"port {name}", "name": name, "type": slot_type, "linkIds": []}


def _inputs_of(class_name: str, links: dict[str, Output]) -> dict[str, str]:
    """Sockets as declared, and numbered ones that were added while editing."""
    declared = {
        name: spec[0]
        for part in OBJECT_INFO[class_name]["input"].values()
        for name, spec in part.items()
        if len(spec) == 1
    }
    return {**declared, **{name: "IMAGE" for name in links if name not in declared}}
