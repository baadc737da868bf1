"""Uploads a picture, runs a prompt with comfy-api-simplified and prints what it concluded."""

import json
import sys

from comfy_api_simplified import ComfyApiWrapper, ComfyWorkflowWrapper

url, prompt_path, picture_path = sys.argv[1:]
api = ComfyApiWrapper(url)
uploaded = api.upload_image(picture_path)
workflow = ComfyWorkflowWrapper(prompt_path)
workflow.set_node_param("Load", "image", f"{uploaded['subfolder']}/{uploaded['name']}")
failure, files = None, {}
try:
    files = api.queue_and_wait_images(workflow, "Save")
except Exception as error:
    failure = f"{type(error).__name__}: {error}"
sizes = {name: len(content) for name, content in files.items()}
sys.stdout.write(json.dumps({"failure": failure, "sizes": sizes}))
