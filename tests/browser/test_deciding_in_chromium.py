"""The nodes that decide, on the canvas: each is pulled out of the library, set up by its form, wired, run and looked at."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from tests.support.server.commands import EXAMPLES
from tests.support.server.customers import png
from tests.support.server.web import WebPage, WebServer

IMAGE = {"name": "image", "type": "image", "binding": "1.image", "required": True}
MEASURES = {"name": "measure", "type": "choice", "binding": "2.measure", "default": "sharpness", "choices": ["sharpness", "exposure", "words"]}  # fmt: skip
REFERENCE = {"name": "reference", "type": "image", "binding": "3.image", "required": True}
FRAME = {
    "name": "Frame",
    "nodes": [
        {"id": "picture", "type": "input", "value_type": "image"},
        {"id": "size", "type": "input", "value_type": "integer", "default": 64},
        {"id": "soft", "type": "workflow", "effect": "soften"},
        {"id": "framed", "type": "output"},
    ],
    "connections": [
        {"from": "picture.value", "to": "soft.input"},
        {"from": "size.value", "to": "soft.size"},
        {"from": "soft.output", "to": "framed.value"},
    ],
}


@pytest.fixture(scope="module", autouse=True)
def judges(web: WebServer) -> None:
    """Workflows that show a number or words about a picture; the built-in engine runs them."""
    for slug, properties in (("measure", [IMAGE, MEASURES]), ("similarity", [IMAGE, REFERENCE])):
        document = json.loads((EXAMPLES / "engine" / f"{slug}.json").read_text())
        web.admin(
            "/workflows",
            slug=slug,
            document=document,
            properties=properties,
            price_tokens=0,
            output_node_id="2",
        )


@pytest.fixture(scope="module")
def frame(web: WebServer) -> None:
    with web.customer.http() as http:
        made = http.post("/api/graphs", json=FRAME)
        assert made.status_code == 201, made.text


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """The larger one is brighter."""
    paths = [tmp_path / "small.png", tmp_path / "large.png"]
    for path, width, shade in zip(paths, (48, 96), (40, 200), strict=True):
        path.write_bytes(png(width, shade, height=48))
    return paths


def port(page: Page, node: str, name: str, side: str) -> Locator:
    place = f"[data-nodeid='{node}'][data-handleid='{name}']"
    return page.locator(f".react-flow__handle.{side}{place}")


def away(page: Page) -> None:
    """Selects nothing."""
    close = page.get_by_role("button", name="Close", exact=True)
    if close.count():
        close.click()
    expect(page.get_by_label("Add a node")).to_be_visible()


def pull(page: Page, title: str, x: int, y: int) -> None:
    """Out of the library onto the canvas."""
    away(page)
    search = page.get_by_label("Add a node")
    search.fill(title)
    entry = page.locator(".canvas-entry", has_text=title).first
    entry.drag_to(page.locator(".canvas-board"), target_position={"x": x, "y": y})
    search.fill("")


def wire(page: Page, begin: tuple[str, str], end: tuple[str, str]) -> None:
    """By mouse, from port to port."""
    away(page)
    for place, side in ((begin, "source"), (end, "target")):
        box = port(page, *place, side).bounding_box()
        assert box
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(*middle, steps=12 if side == "target" else 1)
        if side == "source":
            page.mouse.down()
    page.mouse.up()


def node(page: Page, name: str) -> Locator:
    return page.get_by_role("group", name=re.compile(f"^{name},"))


def select(page: Page, name: str) -> Locator:
    """Opens the settings of a node."""
    away(page)
    node(page, name).locator("header").click()
    panel = page.get_by_role("complementary", name=f"Settings of {name}")
    expect(panel).to_be_visible()
    return panel


def ask_for(page: Page, name: str, kind: str, x: int, y: int) -> None:
    """An input, pulled and named."""
    pull(page, "Input", x, y)
    panel = select(page, "input")
    panel.get_by_label("Type").select_option(kind)
    identify(panel, name)
    expect(node(page, name)).to_be_visible()


def identify(panel: Locator, name: str) -> None:
    field = panel.get_by_label("Id", exact=True)
    field.fill(name)
    field.press("Enter")


def begin(customer: WebPage, name: str) -> Page:
    customer.open("/graphs/new")
    expect(customer.page.get_by_text("The canvas is empty")).to_be_visible()
    customer.page.get_by_label("Graph name").fill(name)
    customer.page.get_by_label("Graph name").blur()
    return customer.page


def named_wires(page: Page) -> Locator:
    return page.locator(".react-flow__edge.is-named")


def start(customer: WebPage, files: list[Path] | None = None) -> Page:
    """Runs what is drawn."""
    page = customer.page
    away(page)
    expect(
        page.get_by_text("No problems").or_(page.get_by_text(re.compile("warning")))
    ).to_be_visible()
    page.get_by_role("button", name=re.compile(r"^Run \(")).click()
    dialog = page.get_by_role("dialog", name=re.compile("^Run "))
    for at, each in enumerate(files or []):
        if at:
            dialog.get_by_role("button", name="Add another file").click()
        dialog.locator("input[type=file]").last.set_input_files(each)
        expect(dialog.get_by_text("Uploaded").last).to_be_visible()
    dialog.get_by_role("button", name=re.compile("^Run")).click()
    expect(page).to_have_url(re.compile(r"/graphs/[0-9a-f-]{36}/runs/[0-9a-f-]{36}$"))
    return page


def ends(page: Page) -> None:
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible()


def stored(web: WebServer, name: str) -> dict[str, Any]:
    """The nodes of a graph, by id."""
    with web.customer.http() as http:
        document = http.get(f"/api/graphs/{name}").json()["document"]
    return {each["id"]: each for each in document["nodes"]}


def draw_value(customer: WebPage) -> None:
    """Two values: one by a template with a name put in, one by a wire."""
    page = customer.page
    pull(page, "Value", 620, 60)
    panel = select(page, "value")
    panel.get_by_label("Name", exact=True).fill("told")
    text = panel.get_by_label(re.compile("^Value of"))
    text.fill("It says {{ measure.output.text | trimmed }}")
    expect(panel.get_by_text(re.compile(r"\(character \d+\)")).first).to_be_visible()
    expect(panel.locator(".canvas-mistake mark")).to_have_text("t")
    customer.screenshot("deciding value wrong")
    assert customer.serious_findings() == []
    text.fill("It says ")
    panel.get_by_label("Insert a value into Value of told").select_option("measure.output.text")
    expect(text).to_have_value("It says {{ measure.output.text }}")
    expect(named_wires(page)).to_have_count(1)
    panel.get_by_role("button", name="Add value").click()
    panel.get_by_label("Name", exact=True).last.fill("size")
    panel.get_by_label("Name", exact=True).last.press("Enter")
    wire(page, ("measure", "output"), ("value", "size"))
    expect(named_wires(page)).to_have_count(2)


def draw_switch(customer: WebPage) -> None:
    """Two ways, each with a mistake that is mended."""
    page = customer.page
    pull(page, "Switch", 870, 60)
    wire(page, ("value", "outputs"), ("switch", "input"))
    panel = select(page, "switch")
    panel.get_by_label("Case 1").fill("dark")
    panel.get_by_label(re.compile("^Condition for")).fill('output.told contains "dark')
    expect(panel.locator(".canvas-mistake mark")).to_be_visible()
    panel.get_by_label(re.compile("^Condition for")).fill('output.told contains "dark"')
    panel.get_by_role("button", name="Add case").click()
    panel.get_by_label("Case 2").fill("bright")
    panel.get_by_label(re.compile("^Condition for")).last.fill("output.told >")
    expect(panel.get_by_label(re.compile("^Condition for bright$"))).to_have_attribute(
        "aria-invalid", "true"
    )
    expect(panel.get_by_label("Condition for dark")).not_to_have_attribute("aria-invalid", "true")
    customer.screenshot("deciding switch wrong")
    panel.get_by_label(re.compile("^Condition for")).last.fill('output.told contains "bright"')


def test_values_are_made_and_a_switch_goes_one_way(
    customer: WebPage, web: WebServer, photos: list[Path]
) -> None:
    page = begin(customer, "Which way")
    ask_for(page, "photo", "image", 60, 60)
    pull(page, "measure", 330, 60)
    wire(page, ("photo", "value"), ("measure", "image"))
    select(page, "measure").get_by_label("words").check()
    draw_value(customer)
    draw_switch(customer)
    pull(page, "Output", 1000, 300)
    identify(select(page, "output"), "bright")
    wire(page, ("switch", "bright"), ("bright", "value"))
    pull(page, "Output", 1000, 480)
    wire(page, ("switch", "dark"), ("output", "value"))
    away(page)
    page.keyboard.press("l")
    customer.screenshot("deciding value and switch")
    start(customer, photos[1:])
    ends(page)
    expect(node(page, "switch").get_by_text("branch: bright")).to_be_visible()
    expect(node(page, "value").get_by_text(re.compile("told: It says"))).to_be_visible()
    expect(page.get_by_role("group", name="output, Output, Skipped")).to_be_visible()
    customer.screenshot("deciding value and switch run")
    assert customer.serious_findings() == []
    nodes = stored(web, "Which way")
    assert [each["name"] for each in nodes["switch"]["cases"]] == ["dark", "bright"]
    assert nodes["value"]["values"]["size"].startswith("{{ measure.output")


def draw_map(customer: WebPage) -> None:
    """An effect for each photo."""
    page = customer.page
    pull(page, "Map", 320, 80)
    wire(page, ("photos", "value"), ("map", "over"))
    expect(named_wires(page)).to_have_count(1)
    panel = select(page, "map")
    expect(panel.get_by_label("List of items")).to_have_value("input.photos")
    panel.get_by_label("Effect or workflow").select_option("effect:soften")
    expect(panel.get_by_label("input", exact=True)).to_have_value("{{ item }}")
    panel.get_by_label("Concurrent jobs").fill("2")
    panel.get_by_label("Continue if an item fails").check()
    customer.screenshot("deciding map")
    assert customer.serious_findings() == []


def draw_score(customer: WebPage) -> None:
    """The two that are exposed best."""
    page = customer.page
    pull(page, "Score", 570, 80)
    wire(page, ("map", "output"), ("score", "over"))
    panel = select(page, "score")
    expect(panel.get_by_label("List of items")).to_have_value("map.output.images")
    panel.get_by_label("Measure", exact=True).select_option("exposure")
    panel.get_by_label("Keep the best").fill("2")
    customer.screenshot("deciding score")


def draw_approval(customer: WebPage) -> None:
    """A person has two days."""
    page = customer.page
    pull(page, "Approval", 820, 80)
    wire(page, ("score", "output"), ("approve", "input"))
    panel = select(page, "approve")
    panel.get_by_label("Question").fill("Which one is it?")
    panel.get_by_label("Allow selecting individual items").check()
    panel.get_by_label("Timeout").fill("2")
    panel.get_by_label("Unit").select_option("days")
    panel.get_by_label("Reject", exact=True).check()
    customer.screenshot("deciding approve")
    assert customer.serious_findings() == []


def test_a_map_a_judge_and_a_person(customer: WebPage, web: WebServer, photos: list[Path]) -> None:
    page = begin(customer, "Best of some")
    ask_for(page, "photos", "image[]", 60, 80)
    draw_map(customer)
    draw_score(customer)
    draw_approval(customer)
    pull(page, "Output", 900, 420)
    wire(page, ("approve", "approved"), ("output", "value"))
    away(page)
    page.keyboard.press("l")
    customer.screenshot("deciding best of some")
    start(customer, photos)
    dialog = page.get_by_role("dialog", name="approve needs your approval")
    expect(dialog.get_by_role("paragraph").filter(has_text="Which one is it?")).to_be_visible()
    expect(dialog.locator(".canvas-picks img")).to_have_count(2)
    dialog.get_by_label("Image 2").check()
    customer.screenshot("deciding question")
    dialog.get_by_role("button", name="Approve 1 of 2").click()
    ends(page)
    expect(node(page, "map").get_by_text("2 items")).to_be_visible()
    # The effect makes two of each.
    expect(node(page, "map").locator(".canvas-picture img")).to_have_count(4)
    expect(node(page, "score").get_by_text(re.compile("^kept 2 of 4, score"))).to_be_visible()
    expect(node(page, "approve").get_by_text("approved, 1 of 2")).to_be_visible()
    customer.screenshot("deciding best of some run")
    assert customer.serious_findings() == []
    node(page, "map").locator("header").click()
    panel = page.get_by_role("complementary", name="Details of map")
    panel.get_by_label("Items").select_option(label="do, item 2, Done")
    expect(panel.locator(".canvas-result img").first).to_be_visible()
    asked = stored(web, "Best of some")["approve"]
    assert (asked["deadline"], asked["on_deadline"], asked["pick"]) == (172800, "reject", True)


def draw_loop(customer: WebPage) -> None:
    """An effect until it is large enough."""
    page = customer.page
    pull(page, "Loop", 330, 80)
    panel = select(page, "loop")
    panel.get_by_label("Effect or workflow").select_option("effect:soften")
    wire(page, ("photo", "value"), ("loop", "input"))
    panel = select(page, "loop")
    expect(panel.get_by_label("input", exact=True)).to_have_value("{{ input.photo }}")
    panel.get_by_text("1 more property").click()
    panel.get_by_label("size", exact=True).fill("{{ round * 32 }}")
    panel.get_by_label("Until").fill("output.width >= ")
    expect(panel.locator(".canvas-mistake mark")).to_be_visible()
    panel.get_by_label("Until").fill("output.width >= 64")
    panel.get_by_label("Max. rounds").fill("4")
    panel.get_by_label("Score of a round").fill("output.width")
    customer.screenshot("deciding loop")
    assert customer.serious_findings() == []


def draw_graph(customer: WebPage) -> None:
    """A stored graph, with its ports."""
    page = customer.page
    pull(page, "Graph", 620, 80)
    panel = select(page, "graph")
    panel.get_by_label("Graph").select_option(label="Frame")
    expect(panel.get_by_label("Version")).to_have_value("1")
    expect(port(page, "graph", "picture", "target")).to_be_visible()
    expect(port(page, "graph", "framed", "source")).to_be_visible()
    expect(node(page, "graph").get_by_text("result", exact=True)).to_be_visible()
    panel.get_by_label("size", exact=True).fill("40")
    wire(page, ("loop", "output"), ("graph", "picture"))
    expect(named_wires(page)).to_have_count(2)
    expect(select(page, "graph").get_by_label("picture", exact=True)).to_have_value(
        "{{ loop.output }}"
    )
    customer.screenshot("deciding graph inside")
    assert customer.serious_findings() == []


def test_a_loop_and_a_graph_inside(
    customer: WebPage, web: WebServer, frame: None, photos: list[Path]
) -> None:
    page = begin(customer, "Again and framed")
    ask_for(page, "photo", "image", 60, 80)
    draw_loop(customer)
    draw_graph(customer)
    pull(page, "Output", 900, 80)
    wire(page, ("graph", "framed"), ("output", "value"))
    away(page)
    page.keyboard.press("l")
    start(customer, photos[1:])
    ends(page)
    expect(node(page, "loop").get_by_text("2 rounds, score 64")).to_be_visible()
    expect(node(page, "loop").locator(".canvas-picture img").first).to_be_visible()
    expect(node(page, "graph").locator(".canvas-picture img").first).to_be_visible()
    expect(port(page, "graph", "framed", "source")).to_be_visible()
    customer.screenshot("deciding loop and graph run")
    assert customer.serious_findings() == []
    node(page, "loop").locator("header").click()
    panel = page.get_by_role("complementary", name="Details of loop")
    panel.get_by_label("Items").select_option(label="do, item 2, Done")
    expect(panel.locator(".canvas-result img").first).to_be_visible()
    assert stored(web, "Again and framed")["graph"]["graph"] == "Frame"


def test_a_property_is_made_by_a_template(customer: WebPage) -> None:
    page = begin(customer, "By template")
    ask_for(page, "size", "integer", 60, 80)
    pull(page, "Picture out of nothing", 340, 80)
    panel = select(page, "negative")
    panel.get_by_label("width: From").select_option("Use a template {{ }}")
    text = panel.get_by_label("width", exact=True)
    expect(text).to_have_attribute("aria-invalid", "true")
    text.fill("{{ input.size * 2 }}")
    expect(named_wires(page)).to_have_count(1)
    pull(page, "Output", 640, 80)
    wire(page, ("negative", "output"), ("output", "value"))
    away(page)
    expect(page.get_by_text("No problems")).to_be_visible()
    text = select(page, "negative").get_by_label("width", exact=True)
    expect(text).to_have_value("{{ input.size * 2 }}")
    text.fill("")
    expect(named_wires(page)).to_have_count(0)


def test_names_are_wires_in_step_with_the_text(customer: WebPage, frame: None) -> None:
    page = begin(customer, "By name")
    ask_for(page, "photo", "image", 60, 80)
    ask_for(page, "photos", "image[]", 60, 330)
    pull(page, "Score", 340, 80)
    panel = select(page, "score")
    panel.get_by_label("List of items").fill("input.photos")
    panel.get_by_label("Workflow", exact=True).check()
    panel.get_by_label("Scoring workflow").select_option("workflow:similarity")
    panel.get_by_label("reference", exact=True).fill("{{ photo }}")
    expect(named_wires(page)).to_have_count(2)
    pull(page, "Map", 640, 80)
    panel = select(page, "map")
    panel.get_by_label("A graph", exact=True).check()
    panel.get_by_label("Graph", exact=True).select_option(label="Frame")
    wire(page, ("score", "output"), ("map", "over"))
    panel = select(page, "map")
    panel.get_by_label("Insert a value into picture").select_option("item")
    expect(named_wires(page)).to_have_count(3)
    pull(page, "Output", 900, 80)
    wire(page, ("map", "output"), ("output", "value"))
    away(page)
    expect(page.get_by_text("No problems")).to_be_visible()
    page.keyboard.press("l")
    customer.screenshot("deciding names")
    identify(select(page, "photo"), "likeness")
    expect(select(page, "score").get_by_label("reference", exact=True)).to_have_value(
        "{{ likeness }}"
    )
    expect(named_wires(page)).to_have_count(3)
    page.get_by_role("group", name=re.compile("^photos.value")).or_(
        page.get_by_role("img", name=re.compile("^photos.value"))
    ).first.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Delete")
    expect(named_wires(page)).to_have_count(2)
    expect(select(page, "score").get_by_label("List of items")).to_have_value("")
    away(page)
    page.keyboard.press("Control+z")
    expect(named_wires(page)).to_have_count(3)
    page.get_by_role("button", name="YAML").click()
    text = page.get_by_label("The graph as YAML")
    text.fill(text.input_value().replace("{{ likeness }}", ""))
    expect(named_wires(page)).to_have_count(2)
