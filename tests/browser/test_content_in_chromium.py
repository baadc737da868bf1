"""Workflows and effects as operators make them: dropped, exposed, tried, compared, published, and used by a customer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.support.server.commands import EXAMPLES
from tests.support.server.customers import png
from tests.support.server.web import WebPage, WebServer, open_page
from tests.unit.saved_files import video

SOFTEN = (EXAMPLES / "workflows" / "soften.json").read_bytes()
DROP = """([name, bytes]) => {
  const given = new DataTransfer()
  given.items.add(new File([new Uint8Array(bytes)], name))
  const event = { dataTransfer: given, bubbles: true, cancelable: true }
  document.body.dispatchEvent(new DragEvent('dragover', event))
  document.body.dispatchEvent(new DragEvent('drop', event))
}"""


@pytest.fixture(scope="module")
def tab(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    with open_page(browser, web.url) as page:
        page.sign_in(web.operator_key, "/console")
        yield page
        assert page.problems == []


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    path.write_bytes(png(64, 120, height=48))
    return path


def drop(page: Page, name: str, content: bytes) -> None:
    page.evaluate(DROP, [name, [*content]])


def test_a_workflow_is_dropped_exposed_tried_published_and_used_by_a_customer(
    tab: WebPage, customer: WebPage, photo: Path
) -> None:
    page = tab.page
    tab.open("/console/workflows")
    drop(page, "My Soften.json", SOFTEN)
    expose(tab)
    page.get_by_role("button", name="Register").click()
    expect(page).to_have_url(re.compile("/console/workflows/my-soften$"))
    expect(page.get_by_role("status").filter(has_text="my-soften version 1")).to_be_visible()
    expect(page.get_by_text("(16 to 512)")).to_be_visible()
    tab.screenshot("workflow")
    assert tab.serious_findings() == []
    try_out(tab, photo)
    page.get_by_role("button", name="Create effect").click()
    page.get_by_label("Title").fill("Soft light")
    expect(page.get_by_label("Address")).to_have_value("soft-light")
    page.get_by_label("Price in tokens").fill("4")
    page.get_by_role("dialog").get_by_role("button", name="Create effect").click()
    expect(page).to_have_url(re.compile("/console/effects/soft-light$"))
    publish(tab, photo)
    use(customer, photo)


def expose(tab: WebPage) -> None:
    """By a click into the drawing, and by the list beside it."""
    page = tab.page
    page.locator("[data-input='1.image']").click()
    properties = page.get_by_role("region", name="Properties")
    expect(properties.get_by_text("This is the customer's file.")).to_be_visible()
    page.get_by_role("searchbox", name="Find an input").fill("longer")
    page.get_by_role("checkbox", name=re.compile("longer_size")).check()
    properties.get_by_label("Label").fill("Longer edge")
    properties.get_by_label("Minimum").fill("16")
    properties.get_by_label("Maximum", exact=True).fill("100")
    expect(properties.get_by_text("The default is outside the range.")).to_be_visible()
    properties.get_by_label("Maximum", exact=True).fill("512")
    expect(properties.get_by_role("slider", name="Default")).to_have_value("256")
    page.get_by_role("searchbox", name="Find an input").fill("prefix")
    page.get_by_role("checkbox", name=re.compile("filename_prefix")).check()
    expect(page.locator(".workflows-drawing-row.is-exposed")).to_have_count(3)
    tab.screenshot("workflow editor")
    assert tab.serious_findings() == []


def try_out(tab: WebPage, photo: Path) -> None:
    page = tab.page
    page.get_by_role("button", name="Test run").click()
    page.get_by_role("button", name="Run test").click()
    expect(page.get_by_text("Choose a file.")).to_be_visible()
    page.get_by_label("File for Input").set_input_files(photo)
    page.get_by_role("button", name="Run test").click()
    expect(page.get_by_role("heading", name="Test result")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^output:")).first).to_be_visible()
    tab.screenshot("workflow tried")
    assert tab.serious_findings() == []


def publish(tab: WebPage, photo: Path) -> None:
    page = tab.page
    view = page.locator(".one-effect-view")
    expect(view.get_by_label("Filename prefix")).to_be_visible()
    page.get_by_role("checkbox", name="Locked Filename prefix").check()
    expect(view.get_by_label("Filename prefix")).to_have_count(0)
    page.get_by_label("Description").fill("Takes the edges off.")
    expect(view.get_by_text("Takes the edges off.")).to_be_visible()
    page.get_by_label("Before of example 1").set_input_files(photo)
    expect(page.get_by_role("img", name="Soft light, before")).to_be_visible()
    page.get_by_label("After of example 1").set_input_files(photo)
    expect(view.get_by_role("img", name="Soft light: before and after")).to_be_visible()
    page.get_by_role("button", name="Save and publish").click()
    expect(page.get_by_role("status").filter(has_text="Soft light is published")).to_be_visible()
    expect(page.get_by_text("Published", exact=True)).to_be_visible()
    tab.screenshot("effect of operators")
    assert tab.serious_findings() == []


def use(customer: WebPage, photo: Path) -> None:
    page = customer.page
    customer.open("/effects/soft-light")
    expect(page.get_by_text("Takes the edges off.")).to_be_visible()
    expect(page.get_by_role("slider", name="Longer edge")).to_be_visible()
    expect(page.get_by_label("Filename prefix")).to_have_count(0)
    page.locator("input[type=file]").first.set_input_files(photo)
    page.get_by_role("button", name="Apply effect").click()
    expect(page.get_by_text("Ready", exact=True)).to_be_visible()


def test_a_file_without_a_workflow_is_told_in_words(tab: WebPage) -> None:
    tab.expect_problem("422")
    page = tab.page
    tab.open("/console/workflows")
    for name, content in (("notes.txt", b"no workflow"), ("plain.png", png(64, 120))):
        drop(page, name, content)
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text(f"No workflow found in {name}")
        expect(alert.get_by_role("button", name="Choose another")).to_be_visible()
    tab.screenshot("workflow refused")
    assert tab.serious_findings() == []


def test_a_picture_holds_a_workflow_and_a_draft_waits_for_its_operator(tab: WebPage) -> None:
    page = tab.page
    tab.open("/console/workflows")
    drop(page, "negative.png", (EXAMPLES / "inputs" / "negative.png").read_bytes())
    expect(page.get_by_text("png, 6 nodes")).to_be_visible()
    page.locator("[data-input='2.width']").click()
    drop(page, "another.json", SOFTEN)
    expect(
        page.get_by_role("status").filter(has_text="Only one workflow can be edited")
    ).to_be_visible()
    rail = page.get_by_role("navigation", name="Console")
    rail.get_by_role("link", name=re.compile("^Effects")).click()
    rail.get_by_role("link", name=re.compile("^Workflows")).click()
    draft = page.get_by_role("note").filter(has_text="negative.png isn't registered yet")
    expect(draft).to_contain_text("1 property exposed")
    draft.get_by_role("button", name="Continue editing").click()
    expect(page.get_by_role("button", name="Settings of Width")).to_be_visible()
    page.get_by_role("button", name="Discard").click()
    page.get_by_role("button", name="Discard workflow").click()
    expect(page.get_by_role("grid", name="Workflows")).to_be_visible()
    expect(page.get_by_role("note")).to_have_count(0)


def test_videos_hold_workflows_too(tab: WebPage) -> None:
    page = tab.page
    tab.open("/console/workflows")
    drop(page, "Soft clip.mp4", video("mp4", {"workflow": SOFTEN.decode()}))
    nodes = len(json.loads(SOFTEN)["nodes"])
    expect(page.get_by_text(f"mp4, {nodes} nodes")).to_be_visible()
    expect(page.get_by_label("Name", exact=True)).to_have_value("soft-clip")
    expect(page.locator("[data-input='1.image']")).to_be_visible()
    page.get_by_role("button", name="Discard").click()
    page.get_by_role("button", name="Discard workflow").click()


def test_a_version_is_tried_before_new_jobs_use_it(
    tab: WebPage, web: WebServer, photo: Path
) -> None:
    page = tab.page
    given = {
        "slug": "tried",
        "properties": [{"name": "input", "type": "image", "binding": "1.image"}],
    }
    web.admin("/workflows", **given, document=json.loads(SOFTEN))
    tab.open("/console/workflows/tried")
    page.get_by_role("button", name="New version").click()
    page.get_by_role("menuitem", name="Edit properties").click()
    page.get_by_role("searchbox", name="Find an input").fill("prefix")
    page.get_by_role("checkbox", name=re.compile("filename_prefix")).check()
    page.get_by_role("button", name="Test first").click()
    expect(page).to_have_url(re.compile(r"/console/workflows/tried\?part=test&version=2$"))
    expect(page.get_by_text("New jobs still use version 1.")).to_be_visible()
    page.get_by_label("File for Input").set_input_files(photo)
    page.get_by_label("Filename prefix").fill("mine")
    page.get_by_role("button", name="Run test").click()
    expect(page.get_by_role("heading", name="Test result")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^output:")).first).to_be_visible()
    tab.screenshot("workflow draft tried")
    assert tab.serious_findings() == []
    page.get_by_role("button", name="Use version 2").click()
    expect(page.get_by_role("status").filter(has_text="New jobs use version 2")).to_be_visible()
    expect(page.get_by_text("New jobs still use version 1.")).to_have_count(0)


def test_versions_are_compared_and_another_one_is_used(tab: WebPage, web: WebServer) -> None:
    page = tab.page
    document = json.loads((EXAMPLES / "workflows" / "soften.json").read_text())
    kept = [each for each in document["nodes"] if each["type"] == "SaveImage"]
    kept[0]["widgets_values"] = ["other"]
    given = {
        "slug": "compared",
        "properties": [{"name": "input", "type": "image", "binding": "1.image"}],
    }
    web.admin("/workflows", **given, document=json.loads(SOFTEN))
    web.admin("/workflows", **given, document=document)
    tab.open("/console/workflows/compared?part=versions")
    changes = page.locator(".workflow-diff")
    expect(changes.locator("del")).to_have_text("softened")
    expect(changes.locator("ins")).to_have_text("other")
    expect(page.locator(".workflows-drawing-node.is-changed")).to_have_attribute("data-node", "7")
    tab.screenshot("workflow versions")
    assert tab.serious_findings() == []
    told = page.get_by_label("To", exact=True).locator("option").all_inner_texts()
    assert all(re.match(r"Version \d, \w+ \d+, 20\d\d, ", each) for each in told)
    page.get_by_label("To", exact=True).select_option("1")
    page.get_by_role("button", name="Use version 1").click()
    expect(page.get_by_role("status").filter(has_text="New jobs use version 1")).to_be_visible()
    expect(page.get_by_text("active", exact=True)).to_be_visible()


def test_properties_of_a_version_are_changed_and_what_would_break_effects_is_asked(
    tab: WebPage,
) -> None:
    """`soften` of the kit is published, and exposes its size."""
    tab.expect_problem("409")
    page = tab.page
    tab.open("/console/workflows/soften")
    page.get_by_role("button", name="New version").click()
    page.get_by_role("menuitem", name="Edit properties").click()
    expect(page.get_by_role("heading", name="New version of soften")).to_be_visible()
    page.get_by_role("button", name="Remove Size").click()
    page.get_by_role("button", name="Register version").click()
    expect(page.get_by_role("alert")).to_contain_text("effects of soften would break")
    page.get_by_role("button", name="Discard").click()
    page.get_by_role("button", name="Discard workflow").click()
    page.get_by_role("button", name="New version").click()
    page.get_by_role("menuitem", name="Edit properties").click()
    page.get_by_role("button", name="Settings of Size").click()
    page.get_by_label("Label").fill("Edge")
    page.get_by_role("button", name="Register version").click()
    expect(page.get_by_role("status").filter(has_text="soften version 2")).to_be_visible()
    expect(page.get_by_text("Edge", exact=True)).to_be_visible()


def test_a_workflow_gets_a_price_is_paused_and_goes_on(tab: WebPage) -> None:
    page = tab.page
    tab.open("/console/workflows/video")
    page.get_by_role("button", name="More actions").click()
    page.get_by_role("menuitem", name="Limits and price").click()
    page.get_by_label("Offer in customers' graphs").check()
    page.get_by_label("Price in tokens").fill("5")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("5 tokens", exact=True)).to_be_visible()
    page.get_by_role("button", name="More actions").click()
    page.get_by_role("menuitem", name="Pause").click()
    expect(page.get_by_text("Paused", exact=True)).to_be_visible()
    told = page.get_by_role("status").filter(has_text="video is paused")
    told.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("Active", exact=True)).to_be_visible()


def test_an_effect_is_unpublished_and_that_undone(tab: WebPage, customer: WebPage) -> None:
    customer.expect_problem("404")
    page = tab.page
    tab.open("/console/effects")
    page.get_by_role("grid").get_by_text("Inverted clip").click()
    page.get_by_role("button", name="Unpublish").click()
    told = page.get_by_role("status").filter(has_text="Inverted clip is no longer published")
    expect(told).to_be_visible()
    customer.open("/effects/video")
    expect(customer.page.get_by_text("Effect not found")).to_be_visible()
    told.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("Published", exact=True)).to_be_visible()
    customer.open("/effects/video")
    expect(customer.page.get_by_role("heading", name="Inverted clip")).to_be_visible()


def test_a_price_is_checked_and_saved(tab: WebPage) -> None:
    page = tab.page
    tab.open("/console/effects/negative")
    save = page.get_by_role("button", name="Save", exact=True)
    expect(save).to_have_attribute("aria-disabled", "true")
    page.get_by_label("Price in tokens").fill("1.5")
    expect(page.get_by_text("Enter a whole number, 0 or more.")).to_be_visible()
    page.get_by_role("button", name="Discard changes").click()
    expect(page.get_by_label("Price in tokens")).to_have_value("2")
    page.get_by_label("Price in tokens").fill("7")
    page.get_by_role("link", name="Effects").first.click()
    page.get_by_role("grid").get_by_text("Picture out of nothing").click()
    expect(page.locator(".one-effect-view").get_by_text("7 tokens").first).to_be_visible()
    save.click()
    expect(page.get_by_role("status").filter(has_text="Saved")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Price in tokens")).to_have_value("7")


def test_a_workflow_is_exposed_on_a_phone_by_keys_alone(browser: Browser, web: WebServer) -> None:
    with open_page(browser, web.url, phone=True, theme="light") as opened:
        opened.sign_in(web.operator_key, "/console/workflows")
        page = opened.page
        drop(page, "phone.json", SOFTEN)
        page.get_by_role("searchbox", name="Find an input").focus()
        page.keyboard.type("scale_method")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        expect(page.get_by_role("button", name="Settings of Scale method")).to_be_visible()
        opened.screenshot("workflow editor phone")
        assert opened.serious_findings() == []
        assert opened.pixels_too_wide() <= 0
        for path in ("/console/workflows/video", "/console/effects/soften"):
            page.once("dialog", lambda dialog: dialog.accept())
            opened.open(path)
            opened.screenshot(f"phone{path.replace('/', '-')}")
            assert opened.serious_findings() == []
            assert opened.pixels_too_wide() <= 0


def test_what_is_not_there_is_told_with_a_way_on(tab: WebPage) -> None:
    tab.expect_problem("404")
    page = tab.page
    for path, told, way in (
        ("/console/workflows/nothing", "Workflow not found", "All workflows"),
        ("/console/effects/nothing", "Effect not found", "All effects"),
    ):
        tab.open(path)
        expect(page.get_by_role("heading", name=told)).to_be_visible()
        page.get_by_role("link", name=way).click()
        expect(page.get_by_role("grid")).to_be_visible()
