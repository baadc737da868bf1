"""An S3 server that checks signatures: `rclone serve s3` on a free port, over its own folder."""

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

START_SECONDS_MAX = 20
ACCESS_KEY, SECRET_KEY = "AKIDCOMFYFLEET", "secret-of-comfyfleet"
_ADDRESS = re.compile(r"Starting s3 server on \[(http://[0-9.:]+)/\]")


@dataclass(frozen=True)
class RunningS3:
    """A running S3 server. `url` is the value for COMFYFLEET_STORAGE_URL. Programs that use the
    server need the variables in `env`."""

    endpoint: str
    bucket: str
    folder: Path
    env: Mapping[str, str] = field(
        default_factory=lambda: {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    )

    @property
    def url(self) -> str:
        return self.url_of()

    def url_of(self, prefix: str = "") -> str:
        return f"s3://{self.bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1"


@contextlib.contextmanager
def running_s3(bucket: str = "comfyfleet") -> Iterator[RunningS3]:
    with tempfile.TemporaryDirectory(prefix="comfyfleet-s3-") as name:
        folder = Path(name)
        (folder / bucket).mkdir()
        with _rclone(folder) as endpoint:
            yield RunningS3(endpoint, bucket, folder)


@contextlib.contextmanager
def _rclone(folder: Path) -> Iterator[str]:
    rclone = str(Path(sys.executable).with_name("rclone"))
    command = [rclone, "serve", "s3", "--config", "/dev/null", "--addr", "127.0.0.1:0"]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(START_SECONDS_MAX, process.kill)
        timer.start()
        try:
            endpoint = _address(process)
            timer.cancel()
            # Its log is read on, or it would stop at a full pipe.
            threading.Thread(target=process.communicate, daemon=True).start()
            yield endpoint
        finally:
            timer.cancel()
            process.kill()


def _address(process: "subprocess.Popen[str]") -> str:
    assert process.stderr
    heard = ""
    for line in process.stderr:
        heard += line
        if found := _ADDRESS.search(line):
            return found[1]
    raise AssertionError(f"rclone did not start: {heard}")
