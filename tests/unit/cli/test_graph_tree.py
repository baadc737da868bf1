"""A graph run as the terminal shows it."""

import io
from typing import Any

from rich.console import Console

from comfyfleet.cli.graph import run_tree
from comfyfleet.client import GraphRun

ID = "7c1f0000-0000-4000-8000-000000000000"
RUN: dict[str, Any] = {
    "id": ID,
    "graph_id": ID,
    "graph_version": 1,
    "created_at": "2026-01-02T03:04:05Z",
    "name": "Album",
    "status": "running",
    "progress": {
        "completed_nodes": 1,
        "total_nodes": 3,
        "weighted_percent": 41.7,
        "running_nodes": [
            {
                "node_id": "soften",
                "index": [1],
                "backend_id": "gpu-7",
                "progress": 0.4,
                "current_step": "node 3, 4 of 10",
            }
        ],
    },
    "nodes": [
        {"id": "each", "type": "fanout", "workflow": None, "status": "done", "expected": 1},
        {
            "id": "soften",
            "type": "workflow",
            "workflow": "soft",
            "status": "running",
            "expected": 2,
        },
    ],
    "questions": [],
    "error": None,
}
RUN["nodes"] = [{**each, "done": 1} for each in RUN["nodes"]]


def shown(**changes: Any) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120).print(run_tree(GraphRun.model_validate({**RUN, **changes})))
    return out.getvalue().splitlines()


def test_nodes_stand_in_order_with_their_jobs_below() -> None:
    assert shown() == [
        "Album: running, 1 of 3 nodes, 42 %",
        "├── ✓ each  fanout",
        "└── ▶ soften  soft  1/2",
        "    └── [1] gpu-7 40 % node 3, 4 of 10",
    ]


def test_a_job_runs_even_where_nobody_is_told_which_worker_runs_it() -> None:
    (job,) = RUN["progress"]["running_nodes"]
    progress = {**RUN["progress"], "running_nodes": [{**job, "backend_id": None}]}
    assert shown(progress=progress)[-1] == "    └── [1] runs 40 % node 3, 4 of 10"


def test_a_question_names_its_choices_and_an_error_its_alternatives() -> None:
    asked = {"node": "draw", "message": "Backend worker:a is offline"}
    question = {**asked, "choices": ["retry", "skip"], "backends": ["worker:b"]}
    error = {"node": "draw", "message": "Node draw failed: no", "alternatives": ["worker:c"]}
    assert shown(questions=[question], error=error)[-3:] == [
        "├── draw asks: Backend worker:a is offline; answer retry, skip (backends: worker:b)",
        "├── Node draw failed: no",
        "└── backends that could run it: worker:c",
    ]


def test_of_an_expired_run_it_is_said_that_nothing_is_left() -> None:
    gone = {"completed_nodes": 0, "total_nodes": 0, "weighted_percent": 100, "running_nodes": []}
    lines = shown(name="", status="completed", nodes=[], progress=gone, is_expired=True)
    assert lines[0] == f"{ID}: completed, 0 of 0 nodes, 100 %"
    assert "the run has expired" in lines[1]


def test_what_would_move_the_cursor_is_not_printed() -> None:
    assert shown(name="a\x1b[2Jb")[0].startswith("a?[2Jb: running")


def test_a_failed_node_shows_its_different_errors_once() -> None:
    failed = {"node": "soften", "status": "failed", "error": "no worker can run it"}
    executions = [{**failed, "index": [item]} for item in range(3)]
    executions.append({**failed, "index": [3], "error": "the picture is damaged"})
    lines = shown(status="completed", executions=executions)
    assert sum("no worker can run it" in line for line in lines) == 1
    assert any("the picture is damaged" in line for line in lines)
