"""A worker as the descriptions of the queue and of the life of a job have it: the standard library and one ComfyUI.

It knows placeholders and no bindings, uploads one file to `output_url`, and completes without naming it.
"""

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from typing import Any

BACKEND = os.environ["BACKEND_URL"]
COMFYUI = os.environ["COMFYUI_URL"]
WORKER_ID = os.environ["WORKER_ID"]
WORKFLOWS = os.environ["WORKFLOW_SLUGS"].split(",")
OUTPUT_KEYS = ("videos", "gifs", "images", "files")
POLL_SECONDS, RUN_SECONDS = 0.2, 3600
HEARTBEAT_SECONDS = 30.0


class Failed(Exception):
    pass


def tell(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def fetch(url: str, data: bytes | None = None, method: str | None = None, **headers: str) -> bytes:
    request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        body: bytes = response.read()
        return body


def post(url: str, body: dict[str, Any], **headers: str) -> Any:
    content = json.dumps(body).encode()
    return json.loads(fetch(url, content, **{"Content-Type": "application/json", **headers}))


class Backend:
    def __init__(self) -> None:
        secret = {"X-Fleet-Secret": os.environ["FLEET_SECRET"]}
        joined = post(
            f"{BACKEND}/api/worker/register",
            {
                "worker_id": WORKER_ID,
                "workflow_slugs": WORKFLOWS,
                "max_concurrency": 1,
                "capabilities": {"comfyui": True},
            },
            **secret,
        )
        self._key = {"Authorization": f"Bearer {joined['token']}"}

    def say(self, endpoint: str, **body: Any) -> Any:
        return post(f"{BACKEND}/api/worker/{endpoint}", body, **self._key)


def upload(name: str, data: bytes) -> str:
    boundary = uuid.uuid4().hex
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n\r\n'
    )
    body = head.encode() + data + f"\r\n--{boundary}--\r\n".encode()
    kind = f"multipart/form-data; boundary={boundary}"
    saved = json.loads(fetch(f"{COMFYUI}/upload/image", body, **{"Content-Type": kind}))
    return str(saved["name"])


def prepare_workflow(payload: dict[str, Any]) -> Any:
    placeholder_map = {
        asset["placeholder"]: upload(f"{uuid.uuid4().hex}-{asset['filename']}", fetch(asset["url"]))
        for asset in payload["assets"]
    }
    text = json.dumps(payload["workflow"])
    for placeholder, name in placeholder_map.items():
        text = text.replace(placeholder, name)
    return json.loads(text)


def run_comfyui(workflow: Any) -> Any:
    try:
        prompt_id = post(f"{COMFYUI}/prompt", {"prompt": workflow})["prompt_id"]
    except urllib.error.HTTPError as error:
        raise Failed(error.read().decode()) from None
    ends = time.monotonic() + RUN_SECONDS
    while time.monotonic() < ends:
        history = json.loads(fetch(f"{COMFYUI}/history/{prompt_id}"))
        if prompt_id in history:
            entry = history[prompt_id]
            if entry["status"]["status_str"] != "success":
                raise Failed(json.dumps(entry["status"]["messages"][-1][1]))
            return prompt_id, entry["outputs"]
        time.sleep(POLL_SECONDS)
    raise Failed("the run took longer than an hour")


def output_file(outputs: Any, node_id: str | None) -> bytes:
    for node, shown in outputs.items():
        if node_id not in (None, node):
            continue
        for key in OUTPUT_KEYS:
            for file in shown.get(key, ()):
                return fetch(f"{COMFYUI}/view?{urllib.parse.urlencode(file)}")
    raise Failed("no output file")


def process(backend: Backend, job: dict[str, Any]) -> None:
    lease = {"dispatch_id": job["dispatch_id"], "lease_token": job["lease_token"]}
    done = threading.Event()

    def heartbeat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            backend.say("heartbeat", **lease)

    threading.Thread(target=heartbeat, daemon=True).start()
    payload = job["input_payload"]
    try:
        prompt_id, outputs = run_comfyui(prepare_workflow(payload))
        data = output_file(outputs, payload["output_node_id"])
        fetch(job["output_url"], data, "PUT", **job["output_headers"])
        backend.say("complete", provider_job_id=prompt_id, **lease)
    except Failed as error:
        backend.say("fail", error_message=str(error), **lease)
    finally:
        done.set()


def wait_for_shutdown() -> None:
    sys.stdin.read()
    stop.set()


def main() -> None:
    backend = Backend()
    tell("registered")
    threading.Thread(target=wait_for_shutdown, daemon=True).start()
    while not stop.is_set():
        polled = backend.say(
            "poll",
            worker_id=WORKER_ID,
            capabilities={"comfyui": True},
            current_load=0,
            max_concurrency=1,
            providers=["self_hosted"],
        )
        if polled["job"]:
            process(backend, polled["job"])
        else:
            time.sleep(POLL_SECONDS)
    backend.say("deregister")
    tell("deregistered")


stop = threading.Event()
if __name__ == "__main__":
    main()
