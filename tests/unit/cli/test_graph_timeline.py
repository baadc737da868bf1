"""The timeline of a run and a comparison as the terminal shows them."""

import io
from typing import Any

from rich.console import Console

from comfyfleet.api.graph_reports import RunTimeline, SpanKind, TimelineSpan
from comfyfleet.cli.graph_reports import bar_of, timeline_lines, took

ID = "7c1f0000-0000-4000-8000-000000000000"
TIMELINE: dict[str, Any] = {
    "run_id": ID,
    "name": "Album",
    "status": "completed",
    "started_at": "2026-01-02T03:04:05Z",
    "seconds": 40,
    "nodes": [
        {
            "id": "draw",
            "type": "workflow",
            "status": "done",
            "executions": 1,
            "expected": 1,
            "spans": [
                {"kind": "queued", "start": 0, "end": 10},
                {"kind": "running", "start": 10, "end": 20},
            ],
            "seconds": {"queued": 10, "running": 10},
            "is_critical": True,
        },
        {
            "id": "a-node-whose-name-is-longer-than-its-column",
            "type": "workflow",
            "status": "done",
            "executions": 3,
            "expected": 3,
            "after": "draw",
            "spans": [{"kind": "running", "start": 20, "end": 40}],
            "seconds": {"running": 60, "held": 3},
            "is_critical": True,
        },
        {"id": "other", "type": "workflow", "status": "skipped", "after": "draw"},
    ],
    "critical_path": [
        {"node": "draw", "start": 0, "end": 20, "seconds": {"queued": 10, "running": 10}},
        {"node": "soften", "index": [2], "start": 20, "end": 40, "seconds": {"running": 20}},
    ],
    "critical_total": 2,
}


def shown(width: int, **changes: Any) -> list[str]:
    timeline = RunTimeline.model_validate({**TIMELINE, **changes})
    out = io.StringIO()
    console = Console(file=out, width=width)
    for line in timeline_lines(timeline, width):
        console.print(line, soft_wrap=True)
    return out.getvalue().splitlines()


def test_a_timeline_fits_into_80_columns() -> None:
    lines = shown(80)
    assert all(len(line) <= 80 for line in lines), max(lines, key=len)
    head, draw, longer, other, legend, *path = [line.rstrip() for line in lines]
    assert head.split() == ["0", "s", "40.0", "s", "ran", "waited", "for"]
    assert draw.startswith("* draw ")
    assert draw.endswith("10.0 s queue 10.0 s")
    assert draw.count("░") + draw.count("█") in (9, 10)
    assert longer.startswith("* a-node-whose-name-is-lo…")
    assert longer.endswith("3 × 20.0 s draw, turn 1.0 s")
    assert other.startswith("  other")
    assert other.endswith("skipped draw")
    assert legend == "  █ ran, ░ waited for a worker, * on the critical path"
    assert path == [
        "critical path, 40.0 s:",
        "  draw  20.0 s (ran 10.0 s, queue 10.0 s)",
        "  soften[2]  20.0 s (ran 20.0 s)",
    ]


def test_a_run_without_records_has_no_timeline() -> None:
    assert shown(80, nodes=[]) == []


def test_names_of_others_cannot_move_the_cursor() -> None:
    node = {**TIMELINE["nodes"][0], "id": "a\x1b[2Jb"}
    assert not any("\x1b" in line for line in shown(80, nodes=[node]))


def test_what_is_shorter_than_a_cell_is_seen_anyway() -> None:
    spans = [
        TimelineSpan(kind=SpanKind.QUEUED, start=0, end=0.1),
        TimelineSpan(kind=SpanKind.RUNNING, start=50, end=50.2),
    ]
    assert "".join(sign for sign, _ in bar_of(spans, 100, 10)) == "░    █    "
    assert "".join(sign for sign, _ in bar_of(spans[:1], 0, 4)).strip(" ") in ("", "░")


def test_long_times_are_in_minutes_and_hours() -> None:
    assert [took(each) for each in (0.04, 61, 7_260)] == ["0.0 s", "1 min 1 s", "2 h 1 min"]
