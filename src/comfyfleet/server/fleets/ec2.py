"""Checks that an EC2 instance that registers as a worker belongs to an auto-scaling group."""

import asyncio
import logging
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from comfyfleet.errors import install_line

logger = logging.getLogger(__name__)

PREFIX = "i-"
# Matches an instance id with an optional suffix, for example i-0123456789abcdef0-gpu1, because a
# machine with several GPUs has one worker per GPU.
WORKER_ID = re.compile(r"(i-(?:[0-9a-f]{17}|[0-9a-f]{8}))(?:[-.:_].*)?")
CONNECT_SECONDS_MAX, ANSWER_SECONDS_MAX = 2, 4  # timeouts of calls to AWS
# AWS error codes for an unknown or malformed id. All other errors count as temporary.
NOT_FOUND_CODES = frozenset({"ValidationError", "InvalidInstanceID.Malformed", "InvalidInstanceID"})


class InstanceStatus(StrEnum):
    KNOWN = "known"
    UNKNOWN = "unknown"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class InstanceCheck:
    """The result of a check. `reason` is shown to a refused worker. If AWS could not be reached,
    the reason is written to the audit log."""

    outcome: InstanceStatus
    reason: str
    group: str | None = None

    @property
    def is_allowed(self) -> bool:
        """Whether the worker may register. If AWS can't be reached, the worker is accepted, because
        it knows the fleet's secret."""
        return self.outcome is not InstanceStatus.UNKNOWN

    @property
    def is_to_be_audited(self) -> bool:
        return self.outcome is InstanceStatus.UNCHECKED


def is_instance(worker_id: str) -> bool:
    return worker_id.startswith(PREFIX)


async def check_instance(worker_id: str) -> InstanceCheck:
    """Checks the instance whose id is in the worker's id. Never raises an exception."""
    match = WORKER_ID.fullmatch(worker_id)
    if not match:
        # Don't send a request to AWS, because its error for a malformed id must not count as a
        # failed check.
        return InstanceCheck(InstanceStatus.UNKNOWN, f"{worker_id} isn't the id of an EC2 instance")
    instance_id = match[1]
    try:
        import botocore.exceptions
    except ModuleNotFoundError:
        return InstanceCheck(InstanceStatus.UNCHECKED, f"boto3 is missing: {install_line('aws')}")
    try:
        answer = await asyncio.to_thread(_describe, instance_id)
    except botocore.exceptions.ClientError as error:
        return _parse_error(instance_id, error.response.get("Error", {}), str(error))
    except botocore.exceptions.BotoCoreError as error:
        return _unchecked(instance_id, str(error))
    return _parse_answer(instance_id, answer)


def _describe(instance_id: str) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_SECONDS_MAX,
        read_timeout=ANSWER_SECONDS_MAX,
        retries={"total_max_attempts": 2},
    )
    # Each call uses a new session, because threads must not share the default session.
    client = boto3.session.Session().client("autoscaling", config=config)
    try:
        return client.describe_auto_scaling_instances(InstanceIds=[instance_id])
    finally:
        client.close()


def _parse_answer(instance_id: str, answer: Any) -> InstanceCheck:
    for instance in answer["AutoScalingInstances"]:
        if instance["InstanceId"] == instance_id:
            group = instance["AutoScalingGroupName"]
            return InstanceCheck(
                InstanceStatus.KNOWN, f"{instance_id} is in the group {group}", group
            )
    return InstanceCheck(
        InstanceStatus.UNKNOWN, f"{instance_id} isn't in an auto-scaling group of this account"
    )


def _parse_error(instance_id: str, error: Any, text: str) -> InstanceCheck:
    if error.get("Code") in NOT_FOUND_CODES:
        return InstanceCheck(InstanceStatus.UNKNOWN, f"{instance_id} is not known to AWS: {text}")
    return _unchecked(instance_id, text)


def _unchecked(instance_id: str, text: str) -> InstanceCheck:
    logger.warning("EC2 instance %s could not be checked with AWS: %s", instance_id, text)
    return InstanceCheck(InstanceStatus.UNCHECKED, f"AWS could not be reached: {text}")
