"""The page of one effect: its form, its file, its price, and what keeps it from starting."""

import re
import struct
import zlib
from base64 import b64encode
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tests.support.server.web import WebPage, WebServer, open_page

FORM = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "photo.png"}},
    "2": {"class_type": "LoadImageMask", "inputs": {"image": "mask.png", "channel": "red"}},
    "3": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "color": 0}},
    "4": {
        "class_type": "ComfyfleetSteps",
        "inputs": {"steps": 2, "step_ms": 0, "previews": True, "image": ["1", 0]},
    },
    "5": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "PREFIX"}},
    "6": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "flat"}},
}
PROPERTIES = (
    {"name": "input", "type": "image", "binding": "1.image"},
    {"name": "area", "type": "image", "format": "mask", "binding": "2.image", "required": False},
    {"name": "steps", "type": "integer", "binding": "4.steps", "minimum": 1, "maximum": 20, "default": 2},
    {"name": "prefix", "type": "text", "placeholder": "PREFIX", "required": True},
    {"name": "channel", "type": "choice", "binding": "2.channel", "choices": ["red", "green"], "default": "red"},
    {"name": "colour", "type": "integer", "format": "colour", "binding": "3.color", "default": 255},
    {"name": "width", "type": "seed", "binding": "3.width", "minimum": 16, "maximum": 90},
)  # fmt: skip


def png(width: int, height: int, *, is_noise: bool = False) -> bytes:
    """A picture; noise can't be compressed, so that it is as large as it looks."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    row = b"\0" + bytes(each % 251 for each in range(width * 3))
    level = 0 if is_noise else 6
    body = zlib.compress(row * height, level)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def form(web: WebServer) -> str:
    """An effect with an input of each kind."""
    web.admin("/workflows", slug="form", document=FORM, properties=PROPERTIES)
    web.admin(
        "/effects",
        slug="form",
        workflow_slug="form",
        title="All inputs",
        price_tokens=2,
        overrides={},
        published=True,
    )
    return "/effects/form"


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    path.write_bytes(png(64, 48))
    return path


def give(opened: WebPage, path: Path) -> None:
    with opened.page.expect_file_chooser() as chooser:
        opened.page.get_by_role("button", name=re.compile("Drop your photo")).click()
    chooser.value.set_files(path)


def test_a_file_is_shown_at_once_uploaded_and_applied(
    customer: WebPage, form: str, photo: Path
) -> None:
    page = customer.page
    customer.open(form)
    page.get_by_role("button", name="Apply effect").click()
    expect(page.locator(".effect-pay").get_by_text("Choose your photo first.")).to_be_visible()
    give(customer, photo)
    expect(page.get_by_role("img", name="Your photo")).to_be_visible()
    expect(page.get_by_text("64×48")).to_be_visible()
    expect(page.get_by_text("Uploaded")).to_be_visible()
    expect(page.get_by_text("This field is required.")).to_be_visible()
    expect(page.locator(".effect-pay").get_by_text("Check the highlighted fields.")).to_be_visible()
    page.get_by_label("Prefix").fill("made")
    expect(page.get_by_text("Balance: 240, 238 after this job.")).to_be_visible()
    page.get_by_role("slider", name="Steps").press("ArrowRight")
    page.get_by_role("radio", name="green").check()
    page.get_by_label("Colour").fill("#ff8000")
    page.get_by_role("button", name="Random seed").click()
    assert 16 <= int(page.get_by_label("Width").input_value()) <= 90
    paint(customer)
    customer.screenshot("effect form")
    assert customer.serious_findings() == []
    with page.expect_request(
        lambda request: request.url.endswith("/api/ai-jobs") and request.method == "POST"
    ) as sent:
        page.get_by_role("button", name="Apply effect").click()
    given = sent.value.post_data_json["properties"]
    assert given["steps"] == 3
    assert given["channel"] == "green"
    assert given["colour"] == 0xFF8000
    assert len(given["area"]) == 36
    expect(page).to_have_url(re.compile("/results/"))


def paint(opened: WebPage) -> None:
    page = opened.page
    page.get_by_role("button", name="Paint", exact=True).click()
    area = page.get_by_role("application").bounding_box()
    assert area is not None
    page.mouse.move(area["x"] + 10, area["y"] + 10)
    page.mouse.down()
    page.mouse.move(area["x"] + 30, area["y"] + 20, steps=3)
    page.mouse.up()
    page.get_by_role("button", name="Use this mask").click()
    expect(page.get_by_text("Painted")).to_be_visible()


def test_a_wrong_file_is_told_before_a_byte_goes_out(
    customer: WebPage, form: str, tmp_path: Path
) -> None:
    page, asked = customer.page, []
    page.on("request", lambda request: asked.append(request.url))
    customer.open(form)
    asked.clear()
    wrong = tmp_path / "notes.txt"
    wrong.write_text("no picture")
    page.locator("input[type=file]").first.set_input_files(wrong)
    expect(page.get_by_text("This file type isn't supported. Use any image.")).to_be_visible()
    expect(page.get_by_text("Choose another")).to_be_visible()
    assert not [each for each in asked if "uploads" in each]
    # What only its content tells is refused by the service, and shown as nothing.
    customer.expect_problem("422")
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(b"no picture")
    page.locator("input[type=file]").first.set_input_files(damaged)
    expect(page.get_by_text("The file is damaged, or it isn't a valid photo.")).to_be_visible()
    expect(page.get_by_role("button", name="Choose another")).to_be_visible()
    expect(page.get_by_role("button", name="Paint", exact=True)).to_be_disabled()
    expect(page.locator(".effect img")).to_have_count(0)


def test_an_upload_pauses_when_the_network_is_lost_and_goes_on_with_what_is_missing(
    customer: WebPage, form: str, tmp_path: Path
) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(png(2000, 3000, is_noise=True))
    customer.expect_problem("Failed to load resource")
    page, puts, lost = customer.page, [], [True]

    def cut(route: Route) -> None:
        if route.request.method != "PUT":
            route.continue_()
            return
        puts.append(route.request.url.partition("?")[0])
        if lost[0] and len(puts) > 1:
            route.abort("internetdisconnected")
        else:
            route.continue_()

    customer.open(form)
    page.route("**/objects/**", cut)
    give(customer, large)
    expect(page.get_by_text("Paused, resumes automatically")).to_be_visible()
    customer.screenshot("effect paused")
    lost[0] = False
    page.evaluate("window.dispatchEvent(new Event('online'))")
    expect(page.get_by_text("Uploaded")).to_be_visible()
    assert puts.count(puts[0]) == 1
    assert len(set(puts)) == 3


def test_a_phone_without_a_network_is_told_so_and_goes_on_by_itself(
    browser: Browser, web: WebServer, form: str, photo: Path
) -> None:
    with open_page(browser, web.url, phone=True) as opened:
        opened.expect_problem("Failed to load|preload|dynamically")
        opened.sign_in(web.customer.key, form)
        page, notice = (
            opened.page,
            opened.page.get_by_text("We'll continue when you're back online"),
        )
        give(opened, photo)
        expect(page.get_by_text("Uploaded")).to_be_visible()
        page.get_by_label("Prefix").fill("made")
        page.context.set_offline(True)
        expect(notice).to_be_visible()
        page.get_by_role("button", name="Apply effect").click()
        told = page.locator(".effect-pay").get_by_text("You're offline. No job was started.")
        expect(told).to_be_visible()
        opened.screenshot("effect offline phone")
        page.context.set_offline(False)
        expect(told).to_have_count(0)
        expect(notice).to_have_count(0)
        # A page whose code is not there yet comes when it can.
        page.context.set_offline(True)
        expect(notice).to_be_visible()
        page.get_by_role("link", name="Wallet", exact=True).click()
        expect(page.get_by_text("You're offline", exact=True)).to_be_visible()
        expect(page).to_have_title(re.compile("^You're offline"))
        page.context.set_offline(False)
        expect(page.get_by_role("heading", name="Wallet")).to_be_visible()


def test_who_comes_back_finds_the_form_as_it_was(
    browser: Browser, web: WebServer, form: str, photo: Path
) -> None:
    user, held, holds = web.server.user(tokens=10), list[Route](), [True]

    def hold(route: Route) -> None:
        if holds[0] and route.request.method == "PUT":
            held.append(route)
        else:
            route.continue_()

    with open_page(browser, web.url, phone=True, theme="light") as opened:
        opened.sign_in(user.key, form)
        page = opened.page
        page.route("**/objects/**", hold)
        give(opened, photo)
        expect(page.get_by_text("Uploading")).to_be_visible()
        page.get_by_label("Prefix").fill("made")
        page.get_by_role("link", name="My media", exact=True).click()
        expect(page).to_have_url(re.compile("/media$"))
        holds[0] = False
        for each in held:
            each.continue_()
        page.go_back()
        expect(page.get_by_text("Uploaded")).to_be_visible()
        expect(page.get_by_label("Prefix")).to_have_value("made")
        # "Back" leaves the brush, not the page; a stroke can be taken back.
        page.get_by_role("button", name="Paint", exact=True).click()
        expect(page.get_by_role("button", name="Undo")).to_be_disabled()
        page.go_back()
        expect(page.get_by_role("dialog")).to_have_count(0)
        paint(opened)
        page.get_by_role("button", name="Paint again").click()
        page.get_by_role("button", name="Undo").click()
        expect(page.get_by_role("button", name="Use this mask")).to_be_disabled()
        opened.screenshot("effect paint phone")
        assert opened.serious_findings() == []
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Apply effect").click()
        expect(page).to_have_url(re.compile("/results/"))
        page.go_back()
        expect(page).to_have_url(re.compile(f"{form}.from="))
        expect(page.get_by_role("img", name="Your photo")).to_be_visible()
        expect(page.get_by_text("Painted")).to_be_visible()
        expect(page.get_by_label("Prefix")).to_have_value("made")


HOLD_THE_PICTURE = """() => {
  const held = Promise.withResolvers()
  let isFree = false
  const hold = event => {
    if (isFree || !event.target.closest?.('.effect-painter')) return
    event.stopImmediatePropagation()
    held.resolve(event.target)
  }
  document.addEventListener('load', hold, true)
  window.pictureHeld = async () => void (await held.promise)
  window.releasePicture = async () => {
    isFree = true
    ;(await held.promise).dispatchEvent(new Event('load'))
  }
}"""


def test_nothing_can_be_painted_on_before_the_picture_has_its_size(
    customer: WebPage, form: str, photo: Path
) -> None:
    """The dialog takes the shape of the picture when it has loaded. Earlier strokes would miss."""
    page = customer.page
    customer.open(form)
    give(customer, photo)
    page.evaluate(HOLD_THE_PICTURE)
    page.get_by_role("button", name="Paint", exact=True).click()
    page.evaluate("() => window.pictureHeld()")
    expect(page.get_by_role("application")).to_have_count(0)
    page.evaluate("() => window.releasePicture()")
    expect(page.get_by_role("application")).to_be_focused()
    page.get_by_role("button", name="Cancel").click()
    paint(customer)


def with_samples(route: Route) -> None:
    """Two of them, before and after, upright."""
    picture = f"data:image/png;base64,{b64encode(png(40, 50)).decode()}"
    file = {"url": picture, "content_type": "image/png", "width": 40, "height": 50}
    answer = route.fetch().json()
    route.fulfill(json={**answer, "examples": [{"before": file, "after": file}] * 2})


def test_a_reload_keeps_file_and_settings_and_a_sign_out_forgets_them(
    browser: Browser, web: WebServer, form: str, photo: Path
) -> None:
    user = web.server.user(tokens=10)
    with open_page(browser, web.url, phone=False, theme="light") as opened:
        opened.sign_in(user.key, form)
        page = opened.page
        give(opened, photo)
        expect(page.get_by_text("Uploaded")).to_be_visible()
        page.get_by_label("Prefix").fill("made")
        page.get_by_role("radio", name="green").check()
        page.reload()
        expect(page.get_by_label("Prefix")).to_have_value("made")
        expect(page.get_by_role("radio", name="green")).to_be_checked()
        expect(page.get_by_role("img", name="Your photo")).to_be_visible()
        page.get_by_role("button", name="Apply effect").click()
        expect(page).to_have_url(re.compile("/results/"))
        # What was sent is no draft any more.
        opened.open(form)
        expect(page.get_by_label("Prefix")).to_have_value("")
        page.get_by_label("Prefix").fill("secret")
        page.reload()
        expect(page.get_by_label("Prefix")).to_have_value("secret")
        page.get_by_role("button", name="Account").click()
        page.get_by_role("menuitem", name="Sign out").click()
        expect(page.get_by_role("link", name="Sign in").first).to_be_visible()
        opened.sign_in(user.key, form)
        expect(page.get_by_label("Prefix")).to_have_value("")


def test_samples_stay_below_each_other_and_beside_the_own_photo(
    browser: Browser, web: WebServer, form: str, photo: Path
) -> None:
    with open_page(browser, web.url, phone=True) as opened:
        page = opened.page
        page.route("**/api/effects/form", with_samples)
        opened.sign_in(web.customer.key, form)
        hero, strip = (page.locator(each).bounding_box() for each in (".wipe", ".effect-strip"))
        assert hero is not None
        assert strip is not None
        assert hero["y"] + hero["height"] <= strip["y"]
        give(opened, photo)
        own = page.locator(".effect-strip").get_by_role("button", name="Your photo")
        second = page.get_by_role("button", name="Sample 2")
        expect(own).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_role("button", name="Sample 1")).to_have_attribute(
            "aria-pressed", "false"
        )
        second.click()
        expect(second).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_role("slider", name="Before/after slider")).to_be_visible()
        own.click()
        expect(page.get_by_role("img", name="Your photo")).to_be_visible()


def test_a_pasted_picture_and_one_of_my_media_are_taken(customer: WebPage, form: str) -> None:
    page = customer.page
    customer.open(form)
    page.evaluate(
        """bytes => {
          const given = new DataTransfer()
          given.items.add(new File([new Uint8Array(bytes)], 'pasted.png', { type: 'image/png' }))
          document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: given }))
        }""",
        [*png(40, 40)],
    )
    expect(page.get_by_text("Uploaded")).to_be_visible()
    page.get_by_role("button", name="Remove pasted.png").click()
    page.get_by_role("button", name="Choose from My media").first.click()
    page.get_by_role("button", name="Use pasted.png").first.click()
    expect(page.get_by_text("From My media", exact=True)).to_be_visible()


def test_too_few_tokens_are_told_with_the_missing_number_and_a_way_on(
    browser: Browser, web: WebServer, form: str
) -> None:
    poor = web.server.user(tokens=1)
    with open_page(browser, web.url, phone=True, theme="light") as opened:
        opened.sign_in(poor.key, form)
        page = opened.page
        expect(page.get_by_text("Balance: 1. You need 1 more token.")).to_be_visible()
        expect(page.get_by_role("button", name="Apply effect")).to_have_count(0)
        opened.screenshot("effect poor phone")
        assert opened.serious_findings() == []
        assert opened.pixels_too_wide() <= 0
        page.get_by_role("link", name="Get tokens").click()
        expect(page).to_have_url(re.compile("/wallet$"))


def test_a_refusal_of_the_api_is_told_with_a_way_on(
    customer: WebPage, form: str, photo: Path
) -> None:
    """Another tab was faster: tokens and places are checked again at the submit."""
    customer.expect_problem("409|422|429")
    page = customer.page
    customer.open(form)
    give(customer, photo)
    page.get_by_label("Prefix").fill("made")
    for code, told, way in (
        ("insufficient_tokens", "Not enough tokens", "Get tokens"),
        ("too_many_active_jobs", "Job limit reached", "View them"),
    ):
        refuse(page, code)
        page.get_by_role("button", name="Apply effect").click()
        expect(page.get_by_text(told)).to_be_visible()
        expect(page.get_by_role("alert").get_by_role("link", name=way)).to_be_visible()
        page.unroute("**/api/ai-jobs")


def refuse(page: Page, code: str) -> None:
    body = {"error": {"code": code, "message": "refused", "details": {}}}
    page.route("**/api/ai-jobs", lambda route: route.fulfill(status=409, json=body))


def test_an_unknown_effect_is_told(customer: WebPage) -> None:
    customer.expect_problem("404")
    customer.open("/effects/nothing")
    expect(customer.page.get_by_text("Effect not found")).to_be_visible()
