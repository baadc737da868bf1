"""Test suites of other projects, at a ComfyUI and through the gateway.

docs/how-to/external-suites.md describes how to run them.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.external.projects import SUITES
from tests.external.suites import (
    GATEWAYS,
    Suite,
    Way,
    differences,
    places_of,
    report_text,
    run_suite,
)

REPORT, OPTIONS = "EXTERNAL_REPORT", "EXTERNAL_OPTIONS"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("suite", [pytest.param(suite, id=suite.name) for suite in SUITES])
def test_a_suite_has_the_same_outcomes_through_the_gateway(suite: Suite, tmp_path: Path) -> None:
    try:
        places = places_of(suite, os.environ)
    except KeyError as missing:
        pytest.skip(f"{missing.args[0]} is not set; see docs/how-to/external-suites.md")
    suite = replace(suite, options=(*suite.options, *os.environ.get(OPTIONS, "").split()))
    folder = Path(os.environ.get(REPORT, tmp_path)) / suite.name
    outcomes = {way: run_suite(suite, places, way, folder / way) for way in Way}
    direct = outcomes[Way.DIRECT]
    found = [
        difference
        for way in GATEWAYS
        for difference in differences(suite, way, direct, outcomes[way])
    ]
    text = report_text(suite, outcomes, found)
    (folder / "report.md").write_text(text, encoding="utf-8")
    assert not [difference for difference in found if difference.reason is None], text
