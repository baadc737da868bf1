"""A worker of comfyfleet in standard-library Python: one ComfyUI, one job at a time.

    COMFYFLEET_URL=http://127.0.0.1:8000 COMFYFLEET_FLEET_SECRET=... COMFYUI_URL=http://127.0.0.1:8188 \
        python plain_worker.py

`comfyfleet worker` does much more: it prefetches, survives crashes, heals its ComfyUI, and cancels.
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
    request = urllib.request.Request(url, data=data, headers=headers or {}, method=method)  # noqa: S310
    with urllib.request.urlopen(request, timeout=90) as answer:  # noqa: S310
        return answer.read()


def call_json(url, body, headers=None):
    headers = {"Content-Type": "application/json", **(headers or {})}
    return json.loads(call(url, json.dumps(body).encode(), headers))


def upload(name, data, folder):
    """Gives ComfyUI a file; what a loader's input takes."""
    mark = uuid.uuid4().hex
    fields = f'--{mark}\r\nContent-Disposition: form-data; name="subfolder"\r\n\r\n{folder}\r\n'
    head = f'--{mark}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n\r\n'
    body = fields.encode() + head.encode() + data + f"\r\n--{mark}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={mark}"}
    saved = json.loads(call(f"{COMFYUI}/upload/image", body, kind))
    return f"{saved['subfolder']}/{saved['name']}"


def prepare(payload, folder):
    """The prompt with the job's files in it; all that it saves goes to a folder of its own."""
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
    """Runs the job to its end, and returns what it made: first file and all texts."""
    prompt = prepare(job["input_payload"], f"plain/{uuid.uuid4().hex}")
    run_id = call_json(f"{COMFYUI}/prompt", {"prompt": prompt})["prompt_id"]
    while not (history := json.loads(call(f"{COMFYUI}/history/{run_id}"))):
        if say("heartbeat", started=True)["cancelled"]:
            raise RuntimeError("cancelled")
        time.sleep(0.5)
    ended = history[run_id]
    if ended["status"]["status_str"] != "success":
        raise RuntimeError(json.dumps(ended["status"]["messages"][-1][1])[:2000])
    wanted = job["input_payload"]["output_node_id"]
    shown = {node: made for node, made in ended["outputs"].items() if wanted in (None, node)}
    items = [
        (node, key, each) for node, made in shown.items() for key in made for each in made[key]
    ]
    files = [each for _, _, each in items if isinstance(each, dict) and each.get("filename")]
    texts = [(node, key, each) for node, key, each in items if isinstance(each, str)]
    return files, [{"node_id": node, "name": key, "value": each} for node, key, each in texts]


def deliver(job, files):
    if not files:
        return []
    data = call(f"{COMFYUI}/view?{urllib.parse.urlencode(files[0])}")
    call(job["output_url"], data, job["output_headers"], method="PUT")
    kind = job["output_headers"].get("Content-Type", "application/octet-stream")
    name = job["outputs"][0]["name"]
    return [
        {"name": name, "size": len(data), "content_type": kind, "filename": files[0]["filename"]}
    ]


def main():
    me = {"worker_id": NAME, "capabilities": {}}
    secret = {"X-Fleet-Secret": os.environ["COMFYFLEET_FLEET_SECRET"]}
    key = {"Authorization": "Bearer " + call_json(CONTROL + "register", me, secret)["token"]}
    while True:
        job = call_json(CONTROL + "poll", {"worker_id": NAME, "wait_seconds": 30}, key)["job"]
        if job is None:
            time.sleep(1)
            continue

        def say(word, job=job, **body):
            lease = {"dispatch_id": job["dispatch_id"], "lease_token": job["lease_token"]}
            return call_json(CONTROL + word, {**lease, **body}, key)

        try:
            files, values = run(job, say)
            say("complete", outputs=deliver(job, files), values=values)
        except urllib.error.HTTPError as error:
            say("fail", error=error.read().decode(errors="replace"))
        except urllib.error.URLError as error:
            say("requeue", reason=f"something did not answer: {error}")
        except RuntimeError as error:
            say("fail", error=str(error))


if __name__ == "__main__":
    main()
