"""ComfyUI's own editor on a fleet, as people use it: in a real browser, by mouse and keys."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from tests.support.server.browser import EditorPage, new_editor_page, open_browser
from tests.support.server.commands import EXAMPLES
from tests.support.server.gateway import GatewayProcess, serving_engines, up_with_engines

STEPS_MAX = 300
PHOTO = EXAMPLES / "inputs" / "photo.png"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("editor")
    with serving_engines(2, folder) as engines, up_with_engines(folder, engines) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def editor(browser: Browser, server: GatewayProcess) -> Iterator[EditorPage]:
    """Without a key: the browser is on the machine of `comfyfleet up`."""
    editor = new_editor_page(browser, server.url)
    editor.open()
    editor.close_first_dialog()
    yield editor
    editor.page.context.close()


@pytest.fixture(autouse=True)
def no_problems(editor: EditorPage) -> Iterator[None]:
    yield
    problems, editor.problems[:] = [*editor.problems], []
    assert not problems


def test_a_template_that_the_fleet_can_run_shows_its_picture_on_the_node(
    editor: EditorPage,
) -> None:
    editor.page.get_by_role("button", name="Templates").click()
    editor.page.get_by_text("Solid color image").click()
    editor.wait_for(lambda: editor.node_types() == ["EmptyImage", "ImageInvert", "SaveImage"], "it")
    editor.run()
    editor.wait_for(lambda: editor.picture_sizes("SaveImage") == [512], "the picture")
    editor.screenshot("picture")


def test_an_upload_is_run_and_its_result_is_in_the_queue_panel(editor: EditorPage) -> None:
    editor.page.get_by_role("button", name="Templates").click()
    editor.page.get_by_text("Negative", exact=True).click()
    editor.wait_for(lambda: editor.node_types() == ["LoadImage", "ImageInvert", "SaveImage"], "it")
    editor.upload("LoadImage", PHOTO)
    editor.run()
    editor.wait_for(lambda: editor.picture_sizes("SaveImage") == [96], "the picture")
    editor.page.get_by_test_id("queue-overlay-toggle").click()
    editor.page.get_by_text("negative_00001_.png").wait_for()
    editor.screenshot("queue")
    editor.page.get_by_test_id("queue-overlay-toggle").click()


def test_a_running_prompt_shows_progress_and_previews_and_can_be_cancelled(
    editor: EditorPage, tmp_path: Path
) -> None:
    editor.load(_written(tmp_path, "slow", _slow()))
    editor.wait_for(lambda: editor.node_types() == ["ComfyfleetSteps", "SaveImage"], "the workflow")
    editor.run()
    editor.wait_for(lambda: editor.progress_of("ComfyfleetSteps"), "progress")
    editor.wait_for(lambda: editor.picture_sizes("ComfyfleetSteps"), "a preview")
    editor.screenshot("running")
    editor.page.get_by_role("button", name="Cancel current run").first.click()
    editor.wait_for(lambda: editor.jobs()[0]["status"] == "cancelled", "the end")
    assert editor.picture_sizes("SaveImage") == []


def test_a_saved_workflow_is_there_again(editor: EditorPage, tmp_path: Path) -> None:
    editor.load(_written(tmp_path, "kept", _colour(width=96)))
    editor.wait_for(lambda: editor.node_types() == ["EmptyImage", "PreviewImage"], "the workflow")
    editor.save_as("kept")
    editor.forget_drafts()
    editor.open()
    # The editor's own graph to begin with has nodes that this fleet has not.
    editor.wait_for(
        lambda: editor.node_types() == ["EmptyImage", "ImageInvert", "SaveImage"], "one"
    )
    editor.open_saved("kept")
    editor.wait_for(lambda: editor.node_types() == ["EmptyImage", "PreviewImage"], "the workflow")
    editor.run()
    editor.wait_for(lambda: editor.picture_sizes("PreviewImage") == [96], "the picture")
    editor.screenshot("again")


def test_users_do_not_see_each_others_work(
    browser: Browser, server: GatewayProcess, editor: EditorPage, tmp_path: Path
) -> None:
    ada = server.user()
    page = new_editor_page(browser, server.url)
    page.log_in("not-a-key")
    assert "invalid" in page.page.get_by_role("alert").inner_text()
    page.problems.clear()  # the answer to it was 401
    page.log_in(ada.key)
    page.wait_until_ready()
    page.close_first_dialog()
    assert page.jobs() == []
    page.load(_written(tmp_path, "secret", _colour(width=64)))
    page.wait_for(lambda: page.node_types() == ["EmptyImage", "PreviewImage"], "the workflow")
    page.run()
    page.wait_for(lambda: page.picture_sizes("PreviewImage") == [64], "the picture")
    page.save_as("secret")
    page.screenshot("logged-in")
    assert page.saved_names() == ["secret.json"]
    assert "secret.json" not in editor.saved_names()
    assert not {job["id"] for job in page.jobs()} & {job["id"] for job in editor.jobs()}
    page.page.get_by_role("button", name="Sign out").click()
    page.page.get_by_text("You are signed out").wait_for()
    page.screenshot("logged-out")
    assert page.kept_keys() == []
    assert not page.problems
    page.page.context.close()


def _written(folder: Path, name: str, workflow: dict[str, Any]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(workflow))
    return path


def _slow() -> dict[str, Any]:
    return _two_nodes("ComfyfleetSteps", [STEPS_MAX, 100, True], "SaveImage", ["slow"])


def _colour(width: int) -> dict[str, Any]:
    return _two_nodes("EmptyImage", [width, 64, 1, 0xFF0000], "PreviewImage", [])


def _two_nodes(first: str, values: list[Any], last: str, last_values: list[Any]) -> dict[str, Any]:
    """As the editor writes it: one node makes a picture, another shows it."""
    picture = {"name": "IMAGE", "type": "IMAGE", "slot_index": 0, "links": [1]}
    common = {"flags": {}, "mode": 0, "properties": {}}
    nodes = [
        {
            **common, "id": 1, "type": first, "pos": [80, 160], "size": [300, 320], "order": 0,
            "inputs": [], "outputs": [picture], "widgets_values": values,
        },
        {
            **common, "id": 2, "type": last, "pos": [480, 160], "size": [300, 320], "order": 1,
            "inputs": [{"name": "images", "type": "IMAGE", "link": 1}], "outputs": [],
            "widgets_values": last_values,
        },
    ]  # fmt: skip
    return {
        "last_node_id": 2,
        "last_link_id": 1,
        "nodes": nodes,
        "links": [[1, 1, 0, 2, 0, "IMAGE"]],
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }
