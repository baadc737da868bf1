"""The cloud as a web application, and one for the length of a `with`."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from comfyfleet.engine.cloud.account import Account
from comfyfleet.engine.cloud.cloud import Cloud
from comfyfleet.engine.cloud.routes import ROUTES, talk
from comfyfleet.engine.door import Door
from comfyfleet.engine.serve import Served, serving


def cloud_app(cloud: Cloud) -> Door[Cloud]:
    return Door(cloud, cloud.engine, ROUTES, {"/ws": talk})


@contextlib.contextmanager
def serving_cloud(accounts: Mapping[str, Account], **options: Any) -> Iterator[Served]:
    """As `serving`, with accounts by their key."""
    with serving(app_of=lambda engine: cloud_app(Cloud(engine, accounts)), **options) as served:
        yield served
