"""The engine dressed as Comfy Cloud, API v1: for tests of clients that talk to it.

Keys, server-chosen ids, content-hash names of uploads, downloads by redirect, raw job states, and
its own shapes of queue and history. What a cloud has beyond that (credits, models) it has not.
"""

from tests.support.backends.comfy_cloud.cloud import CloudAccount, StandInCloud
from tests.support.backends.comfy_cloud.routes import cloud_app, serving_cloud

__all__ = ["CloudAccount", "StandInCloud", "cloud_app", "serving_cloud"]
