"""comfy-api-simplified: python simplified.py URL KEY PROMPT PHOTO RESULT"""

import json
import sys
from pathlib import Path

from comfy_api_simplified import ComfyApiWrapper, ComfyWorkflowWrapper

url, key, prompt, photo, result = sys.argv[1:]
api = ComfyApiWrapper(url, user="me", password=key)
uploaded = api.upload_image(photo)
workflow = ComfyWorkflowWrapper(prompt)
workflow.set_node_param("Load", "image", f"{uploaded['subfolder']}/{uploaded['name']}")
pictures = api.queue_and_wait_images(workflow, "Save")
((name, picture),) = pictures.items()
Path(result).write_bytes(picture)
told = {
    "uploaded": uploaded,
    "name": name,
    "queue": api.get_queue(),
    "load": sorted(api.get_object_info("LoadImage")),
    "version": api.get_system_stats()["system"]["comfyui_version"],
}
sys.stdout.write(json.dumps(told))
