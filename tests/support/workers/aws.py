"""A real AWS simulator as a separate process, and functions that create resources in it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import httpx
from tests.support.server.ports import free_port, wait_until_answering

MOTO = Path(sys.executable).parent / "moto_server"
REGION = "eu-central-1"
STOP_SECONDS_MAX = 60
ANSWER_SECONDS_MAX = 60


def aws_variables(url: str) -> dict[str, str]:
    """Points every AWS client at the simulator, and away from the credentials of this machine's owner."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }


@contextmanager
def simulated_aws() -> Iterator[str]:
    """Yields its URL."""
    port = free_port()
    process = subprocess.Popen(
        [MOTO, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_answering(f"{url}/moto-api/data.json", process)
        yield url
    finally:
        process.terminate()
        process.wait(STOP_SECONDS_MAX)


class Aws:
    """The simulator, with full access. It starts without any resources."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.forget()

    def forget(self) -> None:
        httpx.post(f"{self.url}/moto-api/reset", timeout=ANSWER_SECONDS_MAX).raise_for_status()

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )

    def scale_out(self, group: str = "gpus", *, instances: int = 1) -> list[str]:
        """Creates an auto-scaling group with this many instances; returns their ids."""
        scaling = self.client("autoscaling")
        image = self.client("ec2").describe_images()["Images"][0]["ImageId"]
        scaling.create_launch_configuration(
            LaunchConfigurationName=group, ImageId=image, InstanceType="g5.xlarge"
        )
        scaling.create_auto_scaling_group(
            AutoScalingGroupName=group,
            LaunchConfigurationName=group,
            MinSize=0,
            MaxSize=10,
            DesiredCapacity=instances,
            AvailabilityZones=[f"{REGION}a"],
        )
        members = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group])
        return [each["InstanceId"] for each in members["AutoScalingGroups"][0]["Instances"]]

    def is_protected(self, instance_id: str) -> bool:
        found = self.client("autoscaling").describe_auto_scaling_instances(
            InstanceIds=[instance_id]
        )
        return bool(found["AutoScalingInstances"][0]["ProtectedFromScaleIn"])

    def published(self, namespace: str, fleet: str) -> dict[str, tuple[float, str]]:
        """The figures of a fleet in CloudWatch, with their units."""
        client = self.client("cloudwatch")
        dimensions = [{"Name": "Fleet", "Value": fleet}]
        listed = client.list_metrics(Namespace=namespace, Dimensions=dimensions)["Metrics"]
        now = datetime.now(UTC).timestamp()
        found = {}
        for metric in listed:
            (point,) = client.get_metric_statistics(
                **metric,
                StartTime=now - 300,
                EndTime=now + 300,
                Period=3600,
                Statistics=["Maximum"],
            )["Datapoints"]
            found[metric["MetricName"]] = (point["Maximum"], point["Unit"])
        return found
