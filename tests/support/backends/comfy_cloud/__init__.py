"""The engine behind Comfy Cloud's API v1, for tests of clients.

It supports keys, ids chosen by the server, upload names based on content hashes, downloads by
redirect, raw job states, and the cloud's formats of the queue and the history. It has no credits
and no models.
"""

from tests.support.backends.comfy_cloud.cloud import CloudAccount, StandInCloud
from tests.support.backends.comfy_cloud.routes import cloud_app, serving_cloud

__all__ = ["CloudAccount", "StandInCloud", "cloud_app", "serving_cloud"]
