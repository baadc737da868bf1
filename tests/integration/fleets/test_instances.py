"""Instances that want to register, checked with a simulated AWS."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.server.small_http import Answer, serving
from tests.support.workers.aws import Aws

from comfyfleet.server.fleets.ec2 import InstanceStatus, check_instance, is_instance

STRANGER = "i-0123456789abcdef0"


async def test_an_instance_of_a_group_is_known(aws: Aws) -> None:
    (instance,) = aws.scale_out("gpus")
    verdict = await check_instance(instance)
    assert (verdict.outcome, verdict.group) == (InstanceStatus.KNOWN, "gpus")
    assert verdict.is_allowed
    assert not verdict.is_to_be_audited


async def test_each_worker_of_a_machine_with_several_gpus_is_known(aws: Aws) -> None:
    (instance,) = aws.scale_out("gpus")
    assert (await check_instance(f"{instance}-gpu1")).outcome is InstanceStatus.KNOWN
    assert (await check_instance(f"{STRANGER}-gpu1")).outcome is InstanceStatus.UNKNOWN
    assert (await check_instance(f"{instance}f")).outcome is InstanceStatus.UNKNOWN


async def test_an_instance_outside_any_group_is_refused(aws: Aws) -> None:
    aws.scale_out("gpus")
    ec2 = aws.client("ec2")
    image = ec2.describe_images()["Images"][0]["ImageId"]
    alone = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    for instance in (alone, STRANGER):
        verdict = await check_instance(instance)
        assert verdict.outcome is InstanceStatus.UNKNOWN
        assert not verdict.is_allowed
        assert instance in verdict.reason


@pytest.mark.parametrize("instance", ["i-", "i-zz", "i-0123456789ABCDEF0", "i-0123456789abcdef01"])
async def test_what_is_no_instance_id_is_refused_even_when_aws_is_away(instance: str) -> None:
    assert is_instance(instance)
    assert not (await check_instance(instance)).is_allowed


def test_other_worker_ids_are_not_asked_about() -> None:
    assert not is_instance("gpu-7")


async def test_without_aws_it_is_allowed_and_to_be_audited(
    aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    verdict = await check_instance(STRANGER)
    assert verdict.outcome is InstanceStatus.UNCHECKED
    assert verdict.is_allowed
    assert verdict.is_to_be_audited
    assert "could not be reached" in verdict.reason


@contextmanager
def mute() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_an_aws_that_never_answers_does_not_hold_up_a_registration(
    aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.server.fleets.ec2.ANSWER_SECONDS_MAX", 0.3)
    with mute() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        async with asyncio.timeout(30):  # nobody else gives up before a minute
            verdict = await check_instance(STRANGER)
    assert verdict.outcome is InstanceStatus.UNCHECKED


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("AccessDenied", InstanceStatus.UNCHECKED),
        ("Throttling", InstanceStatus.UNCHECKED),
        ("ValidationError", InstanceStatus.UNKNOWN),
    ],
)
async def test_a_refusal_is_told_apart_from_an_unknown_instance(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, code: str, outcome: InstanceStatus
) -> None:
    body = f"<ErrorResponse><Error><Code>{code}</Code><Message>no</Message></Error></ErrorResponse>"
    answers = {"/": Answer(body.encode(), 400, "text/xml")}
    with serving(answers, "POST") as small:
        monkeypatch.setenv("AWS_ENDPOINT_URL", small.url)
        assert (await check_instance(STRANGER)).outcome is outcome


async def test_without_the_extra_it_is_allowed_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    verdict = await check_instance(STRANGER)
    assert verdict.is_to_be_audited
    assert "comfyfleet[aws]" in verdict.reason
