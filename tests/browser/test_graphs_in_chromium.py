"""The canvas: a graph is drawn by mouse and by keyboard, mended, saved, run, asked about, and tried again."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.support.server.customers import png
from tests.support.server.web import WebPage, WebServer, open_page

SLOW = {
    "2": {
        "class_type": "ComfyfleetSteps",
        "inputs": {"steps": 6, "step_ms": 100, "previews": False},
    },
    "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "made"}},
}
SHOWS = {
    **SLOW,
    "2": {
        "class_type": "ComfyfleetSteps",
        "inputs": {"steps": 80, "step_ms": 100, "previews": True},
    },
}
FAILS = {
    "1": {
        "class_type": "ComfyfleetFail",
        "inputs": {"fail": True, "message": "no face was found", "after_ms": 0},
    },
}
DRAW = {"id": "draw", "type": "workflow", "workflow": "slow"}
OUTPUT = {"id": "picture", "type": "output"}
WIRE = {"from": "draw.output", "to": "picture.value"}


@pytest.fixture(scope="module")
def workflows(web: WebServer) -> None:
    for slug, document in (("slow", SLOW), ("shows", SHOWS), ("fails", FAILS)):
        web.admin("/workflows", slug=slug, document=document, properties=[], price_tokens=1)


@pytest.fixture
def phone(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    with open_page(browser, web.url, phone=True, theme="light") as page:
        page.sign_in(web.customer.key)
        yield page


def graph(web: WebServer, name: str, *nodes: dict[str, Any], wires: Any = (WIRE,)) -> str:
    document = {"name": name, "nodes": [*nodes, OUTPUT], "connections": list(wires)}
    with web.customer.http() as http:
        made = http.post("/api/graphs", json=document)
        assert made.status_code in (200, 201), made.text
        graph_id: str = made.json()["id"]
        return graph_id


def run(web: WebServer, graph_id: str, **body: Any) -> str:
    with web.customer.http() as http:
        started = http.post(f"/api/graphs/{graph_id}/runs", json=body)
        assert started.status_code == 201, started.text
        run_id: str = started.json()["id"]
        return run_id


def port(page: Page, node: str, name: str) -> Locator:
    return page.locator(f".react-flow__handle[data-nodeid='{node}'][data-handleid='{name}']")


def pull(page: Page, title: str, x: int, y: int) -> None:
    """Out of the library onto the canvas."""
    entry = page.locator(".canvas-entry", has_text=title).first
    entry.drag_to(page.locator(".canvas-board"), target_position={"x": x, "y": y})


def wire(page: Page, begin: Locator, end: Locator) -> None:
    for at, place in enumerate((begin, end)):
        box = place.bounding_box()
        assert box
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(*middle, steps=12 if at else 1)
        if not at:
            page.mouse.down()
    page.mouse.up()


def wires(page: Page) -> Locator:
    return page.locator(".react-flow__edge")


def test_a_graph_is_drawn_by_mouse_and_run(customer: WebPage, web: WebServer) -> None:
    page = customer.page
    customer.open("/graphs")
    page.get_by_role("link", name="New graph").or_(
        page.get_by_role("link", name="Create your first graph")
    ).first.click()
    expect(page.get_by_text("The canvas is empty")).to_be_visible()
    pull(page, "Picture out of nothing", 200, 200)
    pull(page, "Softened photo", 520, 200)
    pull(page, "Output", 860, 200)
    expect(page.locator(".canvas-node")).to_have_count(3)
    wire(page, port(page, "negative", "output"), port(page, "soften", "input"))
    wire(page, port(page, "soften", "output"), port(page, "output", "value"))
    expect(wires(page)).to_have_count(2)
    expect(page.get_by_text("No problems")).to_be_visible()
    page.get_by_label("Graph name").fill("By mouse")
    customer.screenshot("canvas drawn")
    page.get_by_role("button", name="Run (5 tokens)").click()
    dialog = page.get_by_role("dialog", name="Run By mouse?")
    dialog.get_by_role("button", name="Run for 5 tokens").click()
    expect(page).to_have_url(re.compile(r"/graphs/[0-9a-f-]{36}/runs/[0-9a-f-]{36}$"))
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible()
    expect(page.get_by_text("3 of 3 nodes, 100%")).to_be_visible()
    expect(page.locator(".canvas-picture:has(img)")).to_have_count(3)
    customer.screenshot("canvas run done")
    assert customer.serious_findings() == []
    page.get_by_role("group", name="soften, Workflow, Done").click()
    panel = page.get_by_role("complementary", name="Details of soften")
    expect(panel.get_by_text("Attempts")).to_be_visible()
    customer.screenshot("canvas run node")
    page.get_by_role("button", name="Outputs").click()
    gallery = page.get_by_role("dialog", name="Outputs of this run")
    expect(gallery.get_by_role("link", name=re.compile("Download")).first).to_be_visible()
    customer.screenshot("canvas outputs")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="All runs").click()
    expect(page.get_by_role("heading", name="Runs of By mouse")).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("Succeeded"))).to_have_count(1)
    with web.customer.http() as http:
        layout = http.get("/api/graphs/By mouse").json()["document"]["layout"]
    assert layout["negative"][0] < layout["soften"][0] < layout["output"][0]


def test_types_refuse_wires_problems_are_ringed_and_undo_brings_back(customer: WebPage) -> None:
    page = customer.page
    customer.open("/graphs/new")
    pull(page, "Input", 150, 150)
    pull(page, "Softened photo", 480, 150)
    pull(page, "Output", 800, 150)
    wire(page, port(page, "soften", "output"), port(page, "output", "value"))
    expect(wires(page)).to_have_count(1)
    ring = page.locator(".canvas-handle.is-wrong[data-nodeid='soften'][data-handleid='input']")
    expect(ring).to_be_visible()
    expect(page.get_by_role("button", name="Run", exact=True)).to_have_attribute(
        "aria-disabled", "true"
    )
    customer.screenshot("canvas problem")
    assert customer.serious_findings() == []
    page.get_by_role("group", name=re.compile("^input, Input")).click()
    page.get_by_label("Type").select_option("text")
    wire(page, port(page, "input", "value"), port(page, "soften", "input"))
    expect(wires(page)).to_have_count(1)
    page.get_by_label("Type").select_option("image")
    wire(page, port(page, "input", "value"), port(page, "soften", "input"))
    expect(wires(page)).to_have_count(2)
    expect(ring).to_have_count(0)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+z")
    expect(wires(page)).to_have_count(1)
    expect(ring).to_be_visible()
    page.keyboard.press("Control+Shift+z")
    expect(ring).to_have_count(0)
    page.get_by_role("group", name=re.compile("^soften, Workflow")).click()
    page.keyboard.press("Delete")
    expect(page.locator(".canvas-node")).to_have_count(2)
    expect(wires(page)).to_have_count(0)
    page.keyboard.press("Control+z")
    expect(page.locator(".canvas-node")).to_have_count(3)
    expect(wires(page)).to_have_count(2)
    page.get_by_role("group", name=re.compile("^soften, Workflow")).click()
    page.keyboard.press("Control+d")
    expect(page.locator(".canvas-node")).to_have_count(4)


def test_a_graph_is_drawn_by_keyboard_alone(customer: WebPage, workflows: None) -> None:
    page = customer.page
    customer.open("/graphs/new")
    for text in ("slow", "condition", "output"):
        page.locator("body").press("a")
        search = page.get_by_label("Add a node")
        expect(search).to_be_focused()
        search.press_sequentially(text)
        search.press("Enter")
        search.blur()
    expect(page.locator(".canvas-node")).to_have_count(3)
    page.get_by_role("group", name=re.compile("^condition")).focus()
    page.keyboard.press("Enter")
    page.get_by_label("From: input").select_option("slow.output")
    text = page.get_by_role("textbox", name="Condition")
    text.fill("output.width >> 3")
    expect(page.get_by_text(re.compile(r"\(character 15\)")).first).to_be_visible()
    expect(page.locator(".canvas-mistake mark")).to_have_text(">")
    customer.screenshot("canvas condition")
    text.fill("output.width > 3")
    page.get_by_role("group", name=re.compile("^output")).focus()
    page.keyboard.press("Enter")
    page.get_by_label("From: value").select_option("condition.true")
    expect(page.get_by_text("No problems")).to_be_visible()
    node = page.get_by_role("group", name=re.compile("^output"))
    place = str(node.get_attribute("style"))
    node.focus()
    page.keyboard.press("ArrowDown")
    expect(node).not_to_have_attribute("style", place)
    page.keyboard.press("l")
    page.get_by_label("Graph name").fill("By keyboard")
    page.keyboard.press("Control+s")
    expect(page.get_by_text("Saved as version 1")).to_be_visible()
    expect(page).to_have_url(re.compile(r"/graphs/[0-9a-f-]{36}$"))


def test_yaml_is_in_step_and_versions_are_compared(
    customer: WebPage, web: WebServer, workflows: None
) -> None:
    page = customer.page
    customer.open(f"/graphs/{graph(web, 'In step', DRAW)}")
    expect(page.get_by_role("button", name="Run (1 token)")).to_be_visible()
    page.get_by_role("button", name="YAML").click()
    text = page.get_by_label("The graph as YAML")
    expect(text).to_have_value(re.compile(r"\{id: draw, type: workflow, workflow: slow\}"))
    customer.expect_problem("422")
    text.fill("name: [a")
    expect(page.get_by_text(re.compile(r"line \d"))).to_be_visible()
    text.fill(
        "name: In step\nnodes:\n- {id: draw, type: workflow, workflow: slow, retries: 2}\n- {id: picture, type: output}\n"
        "- {id: more, type: output}\nconnections:\n- {from: draw.output, to: picture.value}\n"
        "- {from: draw.output.text, to: more.value}\n"
    )
    expect(page.locator(".canvas-node")).to_have_count(3)
    expect(wires(page)).to_have_count(2)
    customer.screenshot("canvas yaml")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("version 2, saved")).to_be_visible()
    page.get_by_role("group", name=re.compile("^more")).click()
    page.get_by_role("button", name="Delete").click()
    expect(text).not_to_have_value(re.compile("more"))
    page.get_by_role("button", name="Versions").click()
    dialog = page.get_by_role("dialog", name="Versions")
    expect(dialog.locator(".is-gone")).to_have_count(2)
    dialog.get_by_label("Compare").select_option("1")
    expect(dialog.locator(".is-new", has_text="retries: 2")).to_be_visible()
    customer.screenshot("canvas versions")
    dialog.get_by_role("button", name="Restore version 1").click()
    expect(page.get_by_text("version 2, not saved")).to_be_visible()
    expect(text).not_to_have_value(re.compile("retries"))


def test_a_run_is_given_files_and_values_and_tells_what_it_costs(
    customer: WebPage, web: WebServer, tmp_path: Path
) -> None:
    page, photo = customer.page, tmp_path / "photo.png"
    photo.write_bytes(png(64, 120, height=48))
    nodes = (
        {"id": "photos", "type": "input", "value_type": "image[]"},
        {"id": "size", "type": "input", "value_type": "integer", "default": 64},
        {"id": "each", "type": "fanout", "mode": "distribute", "per_item": True, "max_items": 90},
        {"id": "soften", "type": "workflow", "effect": "soften"},
        {"id": "all", "type": "merge", "mode": "concat_images", "over": "each"},
    )
    ends = [("photos.value", "each.items"), ("each.item", "soften.input"), ("size.value", "soften.size"),
            ("soften.output", "all.input_0"), ("all.output.images", "picture.value")]  # fmt: skip
    wired = [{"from": begin, "to": end} for begin, end in ends]
    customer.open(f"/graphs/{graph(web, 'With files', *nodes, wires=wired)}")
    page.get_by_role("button", name=re.compile(r"^Run \(0 to 270 tokens\)")).click()
    dialog = page.get_by_role("dialog", name="Run With files?")
    start = dialog.get_by_role("button", name=re.compile("^Run"))
    expect(start).to_have_attribute("aria-disabled", "true")
    dialog.locator("input[type=file]").set_input_files(photo)
    dialog.get_by_label("size").fill("32")
    expect(dialog.get_by_text("Uploaded")).to_be_visible()
    expect(dialog.get_by_role("button", name="Run for 3 tokens")).to_be_visible()
    customer.screenshot("canvas run dialog")
    assert customer.serious_findings() == []
    start.click()
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible()
    expect(page.get_by_text("3 tokens", exact=True)).to_be_visible()
    expect(page.locator(".canvas-picture:has(img)")).to_have_count(3)


# By node: how high it is and, inside it, where its wires end. In pixels of the canvas.
SIZES = """whole => {
  const zoom = new DOMMatrix(getComputedStyle(document.querySelector('.react-flow__viewport')).transform).a
  const wanted = whole ? '.canvas-node:not(.canvas-outline)' : '.canvas-outline'
  return Object.fromEntries([...document.querySelectorAll(wanted)].map(node => {
    const box = node.getBoundingClientRect()
    const ends = [...node.querySelectorAll('[data-handleid]')].map(each => {
      const { left, top } = each.getBoundingClientRect()
      return `${each.dataset.handleid} ${Math.round((left - box.left) / zoom)} ${Math.round((top - box.top) / zoom)}`
    })
    return [node.parentElement.dataset.id, [node.offsetHeight, ends.sort()]]
  }))
}"""


def test_a_large_graph_is_drawn_as_outlines_until_it_can_be_read(
    customer: WebPage, web: WebServer, workflows: None
) -> None:
    page, many = customer.page, range(64)
    uses = ({"workflow": "slow"}, {"effect": "negative"})
    nodes = [{"id": f"draw_{each}", "type": "workflow", **uses[each % 2]} for each in many]
    merge = {"id": "all", "type": "merge", "mode": "collect"}
    ends = [{"from": f"draw_{each}.output", "to": f"all.input_{each}"} for each in many]
    last = {"from": "all.output", "to": "picture.value"}
    customer.open(f"/graphs/{graph(web, 'Large', *nodes, merge, wires=[*ends, last])}")
    expect(page.locator(".canvas-outline")).to_have_count(66)
    expect(wires(page)).to_have_count(65)
    outlines = page.evaluate(SIZES, False)
    for _ in range(9):
        page.get_by_role("button", name="Zoom in").click()
    expect(page.locator(".canvas-node:not(.canvas-outline)").first).to_be_visible()
    expect(page.locator(".canvas-outline").first).to_be_attached()
    whole = page.evaluate(SIZES, True)
    assert whole == {each: outlines[each] for each in whole}


def test_a_node_asks_where_to_go_on(customer: WebPage, web: WebServer, workflows: None) -> None:
    page = customer.page
    bound = {**DRAW, "backend_affinity": "worker:gone", "fallback_strategy": "ask_user"}
    graph_id = graph(web, "Asks", bound)
    customer.open(f"/graphs/{graph_id}/runs/{run(web, graph_id)}")
    dialog = page.get_by_role("dialog", name="Where should “draw” continue?")
    expect(dialog.get_by_text("Needs your input", exact=True)).to_be_visible()
    expect(dialog.get_by_text("shortest queue, 1 token")).to_be_visible()
    customer.screenshot("canvas asks")
    assert customer.serious_findings() == []
    page.keyboard.press("Escape")
    expect(page.get_by_text("1 node needs your input")).to_be_visible()
    page.get_by_role("button", name="Answer").click()
    dialog.get_by_role("button", name=re.compile("^Continue on")).click()
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible()
    expect(page.get_by_role("group", name="draw, Workflow, Done")).to_be_visible()


def test_a_node_shows_what_it_is_making(customer: WebPage, web: WebServer, workflows: None) -> None:
    page = customer.page
    again = {"id": "again", "type": "loop", "do": {"workflow": "shows"}, "until": "true", "at_most": 1}  # fmt: skip
    wire = {"from": "again.output", "to": "picture.value"}
    graph_id = graph(web, "Shows", again, wires=[wire])
    customer.open(f"/graphs/{graph_id}/runs/{run(web, graph_id)}")
    made = page.get_by_role("group", name=re.compile("^again"))
    expect(made.locator("img[src^='data:image/']")).to_be_visible()
    customer.screenshot("canvas preview")
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible()
    expect(made.locator("img[src^='data:image/']")).to_have_count(0)
    expect(made.locator("img")).to_be_visible()


def test_a_person_is_asked_and_picks(customer: WebPage, web: WebServer, workflows: None) -> None:
    page = customer.page
    rows = {"id": "rows", "type": "input", "default": [1, 2]}
    each = {"id": "each", "type": "map", "over": "rows", "do": {"workflow": "slow"}}
    look = {"id": "look", "type": "approve", "message": "Which are good?", "pick": True}
    wires = (
        {"from": "each.output", "to": "look.input"},
        {"from": "look.approved", "to": "picture.value"},
    )
    graph_id = graph(web, "Picks", rows, each, look, wires=wires)
    customer.open(f"/graphs/{graph_id}")
    page.get_by_role("group", name="each, Map").click()
    panel = page.get_by_role("complementary", name="Settings of each")
    expect(panel.get_by_label("Effect or workflow")).to_have_value("workflow:slow")
    customer.open(f"/graphs/{graph_id}/runs/{run(web, graph_id)}")
    dialog = page.get_by_role("dialog", name="look needs your approval")
    expect(dialog.get_by_role("paragraph").filter(has_text="Which are good?")).to_be_visible()
    # Nothing is drawn that nobody has written.
    expect(page.locator(".react-flow__node")).to_have_count(4)
    expect(dialog.get_by_role("button", name="Approve all 2")).to_be_visible()
    expect(dialog.get_by_text("none selected, so all 2 continue")).to_be_visible()
    dialog.get_by_label("Image 2").check()
    expect(dialog.get_by_text("only the selected items continue")).to_be_visible()
    customer.screenshot("canvas approves")
    assert customer.serious_findings() == []
    dialog.get_by_role("button", name="Approve 1 of 2").click()
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible()


def test_runs_are_listed_as_they_come_and_end(
    customer: WebPage, web: WebServer, workflows: None
) -> None:
    page, graph_id = customer.page, graph(web, "Listed", DRAW)
    customer.open("/graphs")
    row = page.get_by_role("link", name=re.compile("Listed, version 1"))
    expect(page.get_by_role("heading", name="Latest runs")).to_be_visible()
    expect(row).to_have_count(0)
    run(web, graph_id)
    expect(row).to_contain_text("Succeeded")
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Search and commands").fill("listed")
    page.get_by_role("option", name=re.compile("Graph run, completed")).click()
    expect(page).to_have_url(re.compile(rf"/graphs/{graph_id}/runs/"))


def test_what_failed_is_told_and_tried_again(
    customer: WebPage, web: WebServer, workflows: None
) -> None:
    page = customer.page
    graph_id = graph(web, "Fails", {**DRAW, "workflow": "fails"})
    customer.open(f"/graphs/{graph_id}/runs/{run(web, graph_id)}")
    expect(page.get_by_text("Node draw failed: no face was found")).to_be_visible()
    customer.screenshot("canvas failed")
    assert customer.serious_findings() == []
    page.get_by_role("button", name="Retry on another backend").click()
    dialog = page.get_by_role("dialog", name="Retry on another backend")
    customer.expect_problem("4(09|22)")
    dialog.get_by_label("Backend").fill("worker:nobody")
    dialog.get_by_role("button", name="Retry on nobody").click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Retry", exact=True).click()
    page.get_by_role("group", name=re.compile("^draw")).click()
    panel = page.get_by_role("complementary", name="Details of draw")
    expect(panel.get_by_text("2", exact=True)).to_be_visible()


def test_a_run_is_run_again_from_a_node_and_leads_back(
    customer: WebPage, web: WebServer, workflows: None
) -> None:
    page = customer.page
    then = {**DRAW, "id": "then", "workflow": "slow", "properties": {}}
    look = {"id": "look", "type": "condition", "condition": "output.images.count > 0"}
    wires = (
        {"from": "draw.output", "to": "look.input"},
        {"from": "look.true", "to": "picture.value"},
        {"from": "then.output", "to": "other.value"},
    )
    graph_id = graph(web, "Again", DRAW, look, then, {"id": "other", "type": "output"}, wires=wires)
    first = run(web, graph_id)
    customer.open(f"/graphs/{graph_id}/runs/{first}")
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible(timeout=60_000)
    page.get_by_role("group", name="then, Workflow, Done").click()
    panel = page.get_by_role("complementary", name="Details of then")
    panel.get_by_role("button", name="Rerun from here").click()
    expect(page.get_by_text("Rerun from then.")).to_be_visible(timeout=60_000)
    expect(page).not_to_have_url(re.compile(first))
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible(timeout=60_000)
    expect(page.get_by_text("1 token", exact=True)).to_be_visible()
    page.get_by_role("group", name="draw, Workflow, Done").click()
    kept = page.get_by_role("complementary", name="Details of draw")
    expect(kept.get_by_role("link", name="an earlier run")).to_be_visible()
    customer.screenshot("canvas again")
    assert customer.serious_findings() == []
    page.get_by_role("link", name="View the earlier run").click()
    expect(page).to_have_url(re.compile(first))
    expect(page.get_by_text("2 tokens", exact=True)).to_be_visible(timeout=60_000)
    expect(page.get_by_text("Rerun from then.")).to_be_hidden()
    page.get_by_text("Reruns:").locator("xpath=..").get_by_role("link").click()
    expect(page.get_by_text("Rerun from then.")).to_be_visible(timeout=60_000)


def require_attribution(page: Page) -> None:
    """React Flow asks for it: seen, inside of the board, and under nothing."""
    board, link = page.locator(".canvas-board"), page.locator(".react-flow__attribution a")
    expect(link).to_be_visible()
    outer, inner = board.bounding_box(), link.bounding_box()
    assert outer
    assert inner
    assert outer["x"] <= inner["x"], (outer, inner)
    assert inner["x"] + inner["width"] <= outer["x"] + outer["width"], (outer, inner)
    assert outer["y"] <= inner["y"], (outer, inner)
    assert inner["y"] + inner["height"] <= outer["y"] + outer["height"], (outer, inner)
    middle = [inner["x"] + inner["width"] / 2, inner["y"] + inner["height"] / 2]
    on_top = (
        "([x, y]) => document.elementFromPoint(x, y)?.closest('.react-flow__attribution') !== null"
    )
    assert page.evaluate(on_top, middle), (outer, inner)


def test_a_run_is_followed_and_cancelled_on_a_phone(
    web: WebServer, phone: WebPage, workflows: None
) -> None:
    page = phone.page
    graph_id = graph(web, "On a phone", DRAW)
    phone.open("/graphs")
    expect(
        page.get_by_text("To edit graphs, use a window at least 700 pixels wide.")
    ).to_be_visible()
    expect(page.get_by_role("link", name="New graph", exact=True)).to_be_hidden()
    phone.open(f"/graphs/{graph_id}")
    expect(page.get_by_text(re.compile("To edit them, use a window"))).to_be_visible()
    phone.screenshot("canvas narrow phone")
    require_attribution(page)
    assert phone.pixels_too_wide() <= 0
    with web.customer.http() as http:
        web.admin("/workflows/slow/pause")
        started = http.post(f"/api/graphs/{graph_id}/runs", json={}).json()["id"]
    phone.open(f"/graphs/{graph_id}/runs/{started}")
    expect(page.locator(".react-flow__attribution")).to_be_visible()
    phone.screenshot("canvas phone")
    require_attribution(page)
    assert phone.pixels_too_wide() <= 0
    assert phone.serious_findings() == []
    page.get_by_role("button", name="Cancel run").click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.get_by_text("Cancelled", exact=True).first).to_be_visible()


def test_on_a_phone_a_question_that_was_put_off_covers_nothing(
    web: WebServer, phone: WebPage, workflows: None
) -> None:
    page = phone.page
    bound = {**DRAW, "backend_affinity": "worker:gone", "fallback_strategy": "ask_user"}
    graph_id = graph(web, "Asks on a phone", bound)
    phone.open(f"/graphs/{graph_id}/runs/{run(web, graph_id)}")
    page.get_by_role("button", name="Later").click()
    expect(page.get_by_role("button", name="Answer")).to_be_visible()
    phone.screenshot("canvas phone asks later")
    page.get_by_role("button", name="Timeline").click(timeout=3_000)
    expect(page).to_have_url(re.compile("view=timeline"))
    page.get_by_role("button", name="Cancel run").click(timeout=3_000)
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.get_by_text("Cancelled", exact=True).first).to_be_visible()


@pytest.mark.parametrize(
    ("path", "told", "way"),
    [
        ("/graphs/00000000-0000-0000-0000-000000000000", "Graph not found", "/graphs"),
        ("/graphs/mistyped", "Graph not found", "/graphs"),
        ("/graph-runs/00000000-0000-0000-0000-000000000000", "Run not found", "/graph-runs"),
    ],
)
def test_a_graph_that_is_not_there_leads_on(
    customer: WebPage, path: str, told: str, way: str
) -> None:
    page = customer.page
    customer.expect_problem("404")
    customer.expect_problem("422")
    customer.open(path)
    expect(page).to_have_title(re.compile(told))
    page.get_by_role("main").get_by_role("link").click()
    expect(page).to_have_url(re.compile(f"{way}$"))
