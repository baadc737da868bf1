"""Figures of fleets in CloudWatch, as a simulated AWS received them."""

import logging
from datetime import UTC, datetime

import pytest
from tests.support.workers.aws import Aws

from comfyfleet.server.maintenance.cloudwatch import CloudWatch, ScalingFigures

NAMESPACE = "Comfyfleet"


async def test_every_fleet_has_its_figures_by_fleet_and_stage(aws: Aws) -> None:
    busy = ScalingFigures("gpus", "production", 100, 3, oldest_age_seconds=12.5, typical_seconds=60)
    idle = ScalingFigures("spare", "staging", 0, 0)
    assert await CloudWatch(NAMESPACE).publish([busy, idle], now=datetime.now(UTC))
    assert aws.published(NAMESPACE, "gpus") == {
        "QueueDepth": (100, "Count"),
        "OldestAgeSeconds": (12.5, "Seconds"),
        "Leased": (3, "Count"),
        "WantedWorkers": (23, "Count"),
    }
    assert aws.published(NAMESPACE, "spare")["WantedWorkers"] == (0, "Count")


async def test_hundreds_of_fleets_go_in_calls_that_cloudwatch_takes(aws: Aws) -> None:
    fleets = [ScalingFigures(f"fleet-{number}", "production", number, 0) for number in range(600)]
    assert await CloudWatch(NAMESPACE).publish(fleets, now=datetime.now(UTC))
    assert aws.published(NAMESPACE, "fleet-599")["QueueDepth"] == (599, "Count")
    pages = aws.client("cloudwatch").get_paginator("list_metrics").paginate(Namespace=NAMESPACE)
    assert sum(len(page["Metrics"]) for page in pages) == 4 * 600


async def test_no_fleets_is_no_call(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert await CloudWatch(NAMESPACE).publish([], now=datetime.now(UTC))


async def test_a_cloudwatch_that_is_away_is_logged_and_told_at_the_next_pass(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleets = [ScalingFigures("gpus", "production", 5, 0)]
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    cloudwatch = CloudWatch(NAMESPACE)
    with caplog.at_level(logging.WARNING, "comfyfleet"):
        assert not await cloudwatch.publish(fleets, now=datetime.now(UTC))
    assert len(caplog.records) == 1
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    assert await cloudwatch.publish(fleets, now=datetime.now(UTC))
    assert aws.published(NAMESPACE, "gpus")["QueueDepth"] == (5, "Count")


async def test_an_endpoint_that_refuses_connections_is_no_error_of_ours(
    aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fleets = [ScalingFigures("gpus", "production", 5, 0)]
    assert not await CloudWatch(NAMESPACE).publish(fleets, now=datetime.now(UTC))
