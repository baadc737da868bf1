"""The engine behind Comfy Cloud's API v1, for tests of clients.

It has keys, server-chosen ids, content-hash names of uploads, downloads by redirect, raw job
states, and the cloud's shapes of queue and history. It has no credits and no models.
"""

from tests.support.backends.comfy_cloud.cloud import CloudAccount, StandInCloud
from tests.support.backends.comfy_cloud.routes import cloud_app, serving_cloud

__all__ = ["CloudAccount", "StandInCloud", "cloud_app", "serving_cloud"]
