"""One browser and one control plane for each module of browser tests."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from playwright.sync_api import Browser
from tests.support.server.browser import open_browser
from tests.support.server.web import WebPage, WebServer, open_page, serving_pages

OpenPage = Callable[..., AbstractContextManager[WebPage]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    with serving_pages(tmp_path_factory.mktemp("web")) as server:
        yield server


@pytest.fixture
def stranger(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    """A tab in which nobody is signed in."""
    with open_page(browser, web.url) as page:
        yield page


@pytest.fixture
def customer(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    with open_page(browser, web.url) as page:
        page.sign_in(web.customer.key)
        yield page


@pytest.fixture
def operator(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    with open_page(browser, web.url) as page:
        page.sign_in(web.operator_key, "/console")
        yield page
