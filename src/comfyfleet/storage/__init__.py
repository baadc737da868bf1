"""Objects by key: a local folder with URLs signed by us, or S3 with presigned ones."""

from comfyfleet.storage.local import LocalStore
from comfyfleet.storage.model import Listed, ObjectFacts, ObjectStore, Presigned
from comfyfleet.storage.opening import open_store

__all__ = [
    "Listed",
    "LocalStore",
    "ObjectFacts",
    "ObjectStore",
    "Presigned",
    "open_store",
]
