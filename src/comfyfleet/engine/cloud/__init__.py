"""The engine dressed as Comfy Cloud, API v1: for tests of clients that talk to it.

Keys, server-chosen ids, content-hash names of uploads, downloads by redirect, raw job states, and
its own shapes of queue and history. What a cloud has beyond that (credits, models) it has not.
"""

from comfyfleet.engine.cloud.account import Account
from comfyfleet.engine.cloud.app import cloud_app, serving_cloud
from comfyfleet.engine.cloud.cloud import Cloud

__all__ = ["Account", "Cloud", "cloud_app", "serving_cloud"]
