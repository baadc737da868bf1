"""A run with comfy-sdk: an upload, a job with its events, outputs, a cancelled job, and errors. Prints what it saw."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import comfy_sdk
from comfy_sdk import Comfy

photo, to, slow = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
seen: dict[str, object] = {}
with Comfy() as client:
    asset = client.assets.from_file(photo)
    workflow = client.workflows.from_json(
        {
            "1": {"class_type": "LoadImage", "inputs": {}},
            "9": {
                "class_type": "SaveImage",
                "inputs": {"images": ["1", 0], "filename_prefix": "sdk"},
            },
        }
    )
    workflow.set_input("1", "image", asset)
    job = client.submit(workflow, metadata={"client": "acme"})
    events = list(job.events())
    seen["events"] = [type(each).__name__ for each in events]
    seen["values"] = [each.value for each in events if isinstance(each, comfy_sdk.Progress)]
    seen["ready"] = [e.output.to_bytes().hex()[:8] for e in events if hasattr(e, "output")]
    job.result()
    seen["status"] = job.status
    seen["names"] = [each.name for each in job.get_outputs("9")]
    seen["path"] = str(job.get_outputs("9")[0].to_file(to))
    seen["part"] = job.outputs[0].to_bytes(range=(1, 3)).decode()
    seen["url"] = job.outputs[0].get_download_url().url
    seen["format"] = job.get_workflow().format
    seen["metadata"] = client.jobs.get(job.id).metadata
    seen["listed"] = [each.id == job.id for each in client.list_jobs(metadata={"client": "acme"})]
    again = client.assets.from_file(photo)
    again.commit()
    seen["deduplicated"] = (again.id == asset.id, again.created_new)
    made = client.assets.get(job.outputs[0].id)
    seen["made_by"] = made.job_id == job.id

    long = client.submit(client.workflows.from_json(slow))
    seen["cancelled"] = long.cancel().wait(timeout=20).status
    key = "once-only"
    client.submit(workflow, idempotency_key=key).wait(timeout=30)
    calls: dict[str, Callable[[], object]] = {
        "reused": lambda: client.submit(workflow, idempotency_key=key),
        "invalid": lambda: client.submit(client.workflows.from_json({"1": {"class_type": "No"}})),
        "missing": lambda: client.jobs.get("00000000-0000-4000-8000-000000000000"),
        "no_asset": lambda: client.assets.get("00000000-0000-4000-8000-000000000000"),
        "key": lambda: Comfy(api_key="cf_wrong").jobs.get("x"),
    }
    for name, call in calls.items():
        try:
            call()
        except comfy_sdk.ComfyError as error:
            seen[name] = [type(error).__name__, error.code, error.http_status]
    asset.delete()
    asset_gone = client.assets.from_file(photo)
    seen["gone"] = client._low.head_asset_by_hash(asset_gone.hash)
sys.stdout.write(json.dumps(seen))
