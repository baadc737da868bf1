"""A front end's calls as the description of the life of a job has them: upload, video, job, polls, result."""

import time
import uuid
from typing import Any

import httpx

POLL_SECONDS = 0.2
TERMINAL = ("completed", "failed", "expired")


class FrontEnd:
    def __init__(self, url: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)

    def call(self, method: str, path: str, **body: Any) -> Any:
        answer = self.http.request(method, f"/api/{path}", json=body or None)
        answer.raise_for_status()
        return answer.json()

    def effect(self, slug: str) -> Any:
        effects = self.call("GET", "effects")["effects"]
        return next(effect for effect in effects if effect["slug"] == slug)

    def upload(self, data: bytes) -> str:
        body = {"filename": "photo.png", "mime_type": "image/png", "size": len(data)}
        made = self.call("POST", "videos/uploads", **body)
        put = self.http.put(made["upload"]["url"], content=data, headers=made["upload"]["headers"])
        put.raise_for_status()
        video = self.call("POST", "videos", original_file_id=made["file"]["id"])
        return str(video["id"])

    def submit(self, effect_id: str, video_id: str) -> Any:
        return self.call(
            "POST",
            "ai-jobs",
            effect_id=effect_id,
            video_id=video_id,
            idempotency_key=str(uuid.uuid4()),
        )

    def ended(self, video_id: str, seconds_max: float = 60) -> Any:
        ends = time.monotonic() + seconds_max
        while time.monotonic() < ends:
            video = self.call("GET", f"videos/{video_id}")
            if video["status"] in TERMINAL:
                return video
            time.sleep(POLL_SECONDS)
        raise TimeoutError(video_id)
