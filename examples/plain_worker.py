"""A small worker that uses only Python's standard library. It runs one job at a time on one ComfyUI.

COMFYFLEET_URL=http://127.0.0.1:8000 COMFYFLEET_FLEET_SECRET=... python plain_worker.py
"""

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid

CONTROL = os.environ["COMFYFLEET_URL"].rstrip("/") + "/api/worker/"
COMFYUI = os.environ.get("COMFYUI_URL", "http://127.0.0.1:8188").rstrip("/")
NAME = os.environ.get("COMFYFLEET_WORKER_ID", f"plain-{os.getpid()}")


def call(url, data=None, headers=None, method=None):
    request = urllib.request.Request(url, data, headers or {}, method=method)  # noqa: S310
    with urllib.request.urlopen(request, timeout=90) as answer:  # noqa: S310
        return answer.read()


def call_json(url, body, headers=None):
    headers = {"Content-Type": "application/json", **(headers or {})}
    return json.loads(call(url, json.dumps(body).encode(), headers))


def upload(name, data, folder):
    """Uploads a file to ComfyUI, and returns the value for a loader's input."""
    mark, field = uuid.uuid4().hex, "Content-Disposition: form-data; name="
    head = f'--{mark}\r\n{field}"subfolder"\r\n\r\n{folder}\r\n--{mark}\r\n{field}"image"; filename="{name}"'
    body = head.encode() + b"\r\n\r\n" + data + f"\r\n--{mark}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={mark}"}
    saved = json.loads(call(f"{COMFYUI}/upload/image", body, kind))
    return f"{saved['subfolder']}/{saved['name']}"


def prepare(payload, folder):
    """Uploads the job's files, and returns a prompt that saves into a separate folder."""
    prompt = payload["workflow"]
    for asset in payload["assets"]:
        name = upload(asset["name"], call(asset["url"]), folder)
        if asset["binding"]:
            node_id, _, field = asset["binding"].rpartition(".")
            prompt[node_id]["inputs"][field] = name
        if asset["placeholder"]:
            prompt = json.loads(json.dumps(prompt).replace(asset["placeholder"], name))
    for node in prompt.values():
        if isinstance(prefix := node["inputs"].get("filename_prefix"), str):
            node["inputs"]["filename_prefix"] = f"{folder}/{os.path.basename(prefix)}"
    return prompt


def run(job, say):
    """Runs the job, and returns its files and the strings that its nodes showed."""
    prompt = prepare(job["input_payload"], f"plain/{uuid.uuid4().hex}")
    run_id = call_json(f"{COMFYUI}/prompt", {"prompt": prompt})["prompt_id"]
    while not (history := json.loads(call(f"{COMFYUI}/history/{run_id}"))):
        if say("heartbeat", started=True)["cancelled"]:
            call(f"{COMFYUI}/interrupt", b"")
            raise RuntimeError("cancelled")
        time.sleep(0.5)
    ended, output_node = history[run_id], job["input_payload"]["output_node_id"]
    if ended["status"]["status_str"] != "success":
        raise RuntimeError(json.dumps(ended["status"]["messages"][-1][1])[:2000])
    files, texts = [], []
    for node, shown in ended["outputs"].items():
        for name, values in shown.items() if output_node in (None, node) else ():
            files += [file for file in values if isinstance(file, dict) and "filename" in file]
            strings = [text for text in values if isinstance(text, str)]
            texts += [{"node_id": node, "name": name, "value": text} for text in strings]
    return files, texts


def deliver(job, files):
    """Uploads the first file to the job's output URL, and returns the outputs for `complete`."""
    if not files:
        return []
    data = call(f"{COMFYUI}/view?{urllib.parse.urlencode(files[0])}")
    headers = job["output_headers"]
    call(job["output_url"], data, headers, method="PUT")
    output = {"name": job["outputs"][0]["name"], "filename": files[0]["filename"]}
    return [{**output, "size": len(data), "content_type": headers["Content-Type"]}]


def work(job, key):
    def say(word, **body):
        lease = {"dispatch_id": job["dispatch_id"], "lease_token": job["lease_token"]}
        return call_json(CONTROL + word, {**lease, **body}, key)

    try:
        files, texts = run(job, say)
        say("complete", outputs=deliver(job, files), values=texts)
    except urllib.error.HTTPError as error:
        say("fail", error=error.read().decode(errors="replace"))
    except urllib.error.URLError as error:
        say("requeue", reason=f"no response: {error}")
    except RuntimeError as error:
        say("fail", error=str(error))


if __name__ == "__main__":
    secret = {"X-Fleet-Secret": os.environ["COMFYFLEET_FLEET_SECRET"]}
    registered = call_json(CONTROL + "register", {"worker_id": NAME, "capabilities": {}}, secret)
    key = {"Authorization": "Bearer " + registered["token"]}
    while True:
        if job := call_json(CONTROL + "poll", {"worker_id": NAME, "wait_seconds": 30}, key)["job"]:
            try:
                work(job, key)
            except urllib.error.HTTPError:  # the job was cancelled, or another worker leased it
                call(f"{COMFYUI}/interrupt", b"")
        else:
            time.sleep(1)
