"""What is in deploy/ is read by the programs it is meant for, as far as they can be had."""

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.server.processes import COMFYFLEET
from tests.support.workers.aws import REGION, Aws

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
# boto3's name of a call that we make → the permission for it.
CALLS = {
    "describe_auto_scaling_instances": "autoscaling:DescribeAutoScalingInstances",
    "set_instance_protection": "autoscaling:SetInstanceProtection",
    "put_metric_data": "cloudwatch:PutMetricData",
}

# This machine, AWS's metadata service, and examples.
KNOWN_HOSTS = {"127.0.0.1", "169.254.169.254", "example.com", "fleet.example.com"}


def document(name: str) -> Any:
    return json.loads((DEPLOY / "aws" / name).read_text())


def allowed(name: str) -> set[str]:
    found: set[str] = set()
    for statement in document(name)["Statement"]:
        actions = statement["Action"]
        found |= {actions} if isinstance(actions, str) else set(actions)
    return found


def permissions_needed_by(*rooms: str) -> set[str]:
    names = {
        node.attr
        for room in rooms
        for path in (ROOT / "src" / "comfyfleet" / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    return {CALLS[name] for name in names & CALLS.keys()}


def test_workers_and_control_plane_may_do_what_they_do_and_no_more() -> None:
    reading_the_secret = {"ssm:GetParameter"}
    files = {"s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket"}
    assert allowed("iam-worker.json") == permissions_needed_by("worker") | reading_the_secret
    assert allowed("iam-control-plane.json") == permissions_needed_by("server") | files


def test_aws_takes_the_scaling_policies_and_alarms(aws: Aws) -> None:
    aws.scale_out("comfyfleet-gpus", instances=0)
    scaling, cloudwatch = aws.client("autoscaling"), aws.client("cloudwatch")
    for direction in ("out", "in"):
        scaling.put_scaling_policy(**document(f"scale-{direction}-policy.json"))
        cloudwatch.put_metric_alarm(**document(f"scale-{direction}-alarm.json"))
    assert len(scaling.describe_policies()["ScalingPolicies"]) == 2
    assert len(cloudwatch.describe_alarms()["MetricAlarms"]) == 2


def test_aws_takes_the_group_of_the_guide(aws: Aws) -> None:
    ec2, scaling = aws.client("ec2"), aws.client("autoscaling")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    ec2.create_launch_template(
        LaunchTemplateName="comfyfleet-gpus", LaunchTemplateData={"ImageId": image}
    )
    guide = (ROOT / "docs" / "how-to" / "spot-and-autoscaling.md").read_text()
    [named] = re.findall(r"--mixed-instances-policy file://deploy/aws/(\S+)", guide)
    scaling.create_auto_scaling_group(
        AutoScalingGroupName="comfyfleet-gpus",
        MinSize=0,
        MaxSize=20,
        AvailabilityZones=[f"{REGION}a"],
        MixedInstancesPolicy=document(named),
    )
    [group] = scaling.describe_auto_scaling_groups()["AutoScalingGroups"]
    template = group["MixedInstancesPolicy"]["LaunchTemplate"]
    assert len(template["Overrides"]) > 1


def test_every_file_that_the_guide_names_is_there() -> None:
    guide = (ROOT / "docs" / "how-to" / "spot-and-autoscaling.md").read_text()
    named = re.findall(r"file://([\w./-]+)", guide)
    assert named
    for name in named:
        assert (ROOT / name).exists() or (DEPLOY / "aws" / name).exists(), name


@pytest.mark.parametrize("direction", ["out", "in"])
def test_the_steps_of_a_scaling_policy_leave_no_gap(direction: str) -> None:
    steps = document(f"scale-{direction}-policy.json")["StepAdjustments"]
    edges = sorted(
        (each.get("MetricIntervalLowerBound", -1e9), each.get("MetricIntervalUpperBound", 1e9))
        for each in steps
    )
    assert [high for _, high in edges[:-1]] == [low for low, _ in edges[1:]]
    assert {edges[0][0], edges[-1][1]} == ({0, 1e9} if direction == "out" else {-1e9, 0})


def test_the_user_data_are_a_script_that_bash_can_read() -> None:
    done = subprocess.run(
        ["bash", "-n", str(DEPLOY / "aws" / "user-data.sh")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_files_name_no_address_of_somebody_else() -> None:
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file()]
    hosts = {host for text in texts for host in re.findall(r"https?://([\w.-]*\w)", text)}
    assert hosts <= KNOWN_HOSTS


@pytest.mark.parametrize(
    ("unit", "command"),
    [("comfyfleet-control.service", "serve"), ("comfyfleet-worker@.service", "worker")],
)
def test_units_use_only_options_that_there_are(unit: str, command: str) -> None:
    text = (DEPLOY / "systemd" / unit).read_text()
    _, found, rest = text.partition(f"bin/comfyfleet {command} ")
    assert found
    # What ComfyUI is started with is its own.
    options = set(re.findall(r"--[a-z-]+", re.split(r'--comfyui-command "', rest)[0]))
    told = subprocess.run([COMFYFLEET, command, "--help"], capture_output=True, text=True)
    assert options <= set(re.findall(r"--[a-z-]+", told.stdout))
