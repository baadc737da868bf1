"""Paused runs start no jobs, and their deadline moves by the time of the pause."""

from dataclasses import replace
from datetime import timedelta

import pytest
from tests.unit.graphs.simulation import failures, started
from tests.unit.graphs.test_decide import line

from comfyfleet.errors import Conflict
from comfyfleet.server.graphs.decide import decide_pause, decide_resume
from comfyfleet.server.graphs.run import GraphRunStatus

HOUR = timedelta(hours=1)


def test_a_paused_run_takes_results_and_starts_nothing_until_it_is_resumed() -> None:
    s = line()
    assert started(s.start()) == ["fix"]
    s.follow(decide_pause(s.run, s.environment))
    assert started(s.done("fix")) == []
    assert s.run.paused_at == s.environment.now
    s.follow(decide_resume(s.run, s.environment))
    assert started(s.tell()) == ["then"]
    s.done("then")
    assert s.run.status == GraphRunStatus.COMPLETED


def test_a_failed_job_of_a_paused_run_is_retried_after_the_pause() -> None:
    s = line(retries=1)
    s.start()
    s.follow(decide_pause(s.run, s.environment))
    assert started(s.failed("fix")) == []
    s.follow(decide_resume(s.run, s.environment))
    assert started(s.tell()) == ["fix"]


def test_a_pause_does_not_count_to_the_deadline() -> None:
    s = line()
    s.start()
    now = s.environment.now
    s.run = replace(s.run, deadline_at=now + HOUR)
    s.follow(decide_pause(s.run, s.environment))
    s.environment = replace(s.environment, now=now + 5 * HOUR)
    assert failures(s.tell()) == []
    s.follow(decide_pause(s.run, s.environment))  # again: it is paused since the first time
    s.follow(decide_resume(s.run, s.environment))
    assert s.run.deadline_at == now + 6 * HOUR
    s.environment = replace(s.environment, now=now + 7 * HOUR)
    s.tell()
    assert s.run.status == GraphRunStatus.FAILED


def test_only_an_active_run_is_paused_or_resumed_and_a_retry_ends_the_pause() -> None:
    s = line()
    s.start()
    s.follow(decide_pause(s.run, s.environment))
    s.failed("fix")
    assert s.run.status == GraphRunStatus.FAILED
    with pytest.raises(Conflict):
        decide_pause(s.run, s.environment)
    with pytest.raises(Conflict):
        decide_resume(s.run, s.environment)
    assert started(s.retry()) == ["fix"]
