"""`comfyfleet serve` and `comfyfleet db`, as processes where that matters."""

import json
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.databases.postgres import create_database
from tests.support.server.command_process import CommandProcess, executed, started
from tests.support.server.commands import comfyfleet

URL = r"Control plane at (http://\S+)"
KEY = r"export COMFYFLEET_URL=\S+ COMFYFLEET_KEY=(\w{64})"


def asked(running: CommandProcess, path: str) -> httpx.Response:
    return httpx.get(running.wait_for_line(URL)[1] + path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_is_ready_and_stops_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with executed("serve", "--port", "0", folder=tmp_path) as running:
        running.wait_for_line(KEY)
        assert asked(running, "/readyz").status_code == 200
        assert running.stop(number) == 0
        logged = [json.loads(line) for line in running.said if line.startswith("{")]
        messages = [line["message"] for line in logged]
        assert messages[-1] == "stopped"
        assert f"stopping: {number.name} received" in messages


def test_logs_that_are_no_terminals_are_json_with_ids(tmp_path: Path) -> None:
    with started("serve", "--port", "0", folder=tmp_path) as running:
        answer = asked(running, "/nowhere?signature=abc")
        line = running.wait_for_line('"route": "unknown"').string
        entry = json.loads(line)
        assert entry["request_id"] == answer.headers["x-request-id"]
        assert (entry["status"], entry["path"], entry["level"]) == (404, "/nowhere", "info")
        assert "abc" not in line


def test_a_second_process_on_sqlite_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with started("serve", "--port", "0", folder=tmp_path) as first:
        first.wait_for_line(URL)
        with started("serve", "--port", "0", folder=tmp_path) as second:
            said = second.wait_for_line("a SQLite database supports only one control plane").string
            assert f"process {first.process.pid} already serves" in said
            second.wait_for_line("hint: Stop that process")
            assert second.process.wait(60) == 1
        upgrade = comfyfleet("db", "upgrade", "--data", str(tmp_path / "comfyfleet-data"))
        assert upgrade.code == 1
        assert "already serves" in upgrade.err
        assert asked(first, "/readyz").status_code == 200


def test_a_process_that_was_killed_holds_nobody_back_and_the_key_stays(tmp_path: Path) -> None:
    with started("serve", "--port", "0", folder=tmp_path) as first:
        first.wait_for_line(KEY)
        assert first.stop(signal.SIGKILL) != 0
    with started("serve", "--port", "0", folder=tmp_path) as again:
        assert asked(again, "/readyz").status_code == 200
        assert again.stop() == 0
        assert not any("COMFYFLEET_KEY" in line for line in again.said)


def test_a_port_that_is_taken_is_said_so(tmp_path: Path) -> None:
    with started("serve", "--port", "0", folder=tmp_path) as first:
        port = first.wait_for_line(URL)[1].rpartition(":")[2]
        other = comfyfleet("serve", "--port", port, "--data", str(tmp_path / "other"))
        assert other.code == 1
        assert "can't listen on" in other.err


async def test_postgres_is_upgraded_first_and_then_serves_two(
    postgres_databases: Databases, tmp_path: Path
) -> None:
    assert postgres_databases.server_url
    url = await create_database(postgres_databases.server_url)
    environ = {
        "COMFYFLEET_CENTRAL_DATABASE_URL": url,
        # Both histories may live in one database.
        "COMFYFLEET_TENANT_DATABASE_URLS": f"main={url}",
        "COMFYFLEET_ADMIN_KEY": "k",
    }
    with started("serve", "--port", "0", folder=tmp_path, **environ) as early:
        early.wait_for_line("hint: comfyfleet db upgrade")
        assert early.process.wait(60) == 1
    with started("db", "upgrade", folder=tmp_path, **environ) as upgrade:
        upgrade.wait_for_line(r"central: \w+ \(was empty\)")
        upgrade.wait_for_line(r"pool main: \w+ \(was empty\)")
        assert upgrade.process.wait(60) == 0
    with (
        started("serve", "--port", "0", folder=tmp_path, **environ) as first,
        started("serve", "--port", "0", "--no-loops", folder=tmp_path, **environ) as second,
    ):
        assert asked(first, "/readyz").status_code == 200
        assert asked(second, "/readyz").status_code == 200


def test_db_current_looks_without_making_anything(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert comfyfleet("db", "current", "--data", str(data)).code == 0
    assert not data.exists()
    assert comfyfleet("db", "upgrade", "--data", str(data)).code == 0
    shown = comfyfleet("db", "current", "--data", str(data)).out
    assert "none" not in shown


@pytest.mark.parametrize(
    ("name", "value"),
    [("COMFYFLEET_LEASE_SECONDS", "soon"), ("COMFYFLEET_CENTRAL_DATABASE_URL", "x")],
)
def test_a_setting_that_makes_no_sense_is_named(tmp_path: Path, name: str, value: str) -> None:
    result = comfyfleet("db", "upgrade", "--data", str(tmp_path), environ={name: value})
    assert result.code == 1
    assert "error: " in result.err


@pytest.mark.parametrize(
    "command", [("db", "upgrade"), ("db", "current"), ("serve", "--port", "0")]
)
def test_postgres_without_its_driver_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    environ = {"COMFYFLEET_CENTRAL_DATABASE_URL": "postgresql://u:p@127.0.0.1:1/x"}
    result = comfyfleet(*command, "--data", str(tmp_path), environ=environ)
    assert result.code == 1
    assert result.lines == [
        "error: PostgreSQL needs asyncpg, which is not installed",
        'hint: pip install "comfyfleet[postgres]"',
    ]


def test_cloudwatch_without_its_package_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    environ = {"COMFYFLEET_CLOUDWATCH_NAMESPACE": "Comfyfleet", "COMFYFLEET_ADMIN_KEY": "k" * 16}
    result = comfyfleet("serve", "--port", "0", "--data", str(tmp_path), environ=environ)
    assert result.code == 1
    assert result.lines[-2:] == [
        "error: COMFYFLEET_CLOUDWATCH_NAMESPACE needs boto3, which is not installed",
        'hint: pip install "comfyfleet[aws]"',
    ]


@pytest.mark.parametrize("command", ["serve", "up", "engine"])
@pytest.mark.parametrize("port", ["80000", "-1"])
def test_a_port_that_cannot_be_is_wrong_usage(command: str, port: str) -> None:
    result = comfyfleet(command, f"--port={port}")
    assert result.code == 2
    assert "--port" in result.err


@pytest.mark.parametrize("command", ["serve", "up", "engine"])
def test_a_data_folder_that_cannot_be_made_is_told_in_one_line(command: str) -> None:
    result = comfyfleet(command, "--port", "0", "--data", "/proc/x")
    assert result.code == 1
    assert result.lines[0].startswith("error: ")


def test_the_engine_tells_of_a_taken_port_as_the_others_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = comfyfleet("engine", "--port", str(taken.getsockname()[1]))
    assert result.code == 1
    assert "can't listen on" in result.lines[0]
    assert result.lines[1].startswith("hint: The port may be in use")


def test_several_processes_are_refused_on_sqlite(tmp_path: Path) -> None:
    done = comfyfleet("serve", "--processes", "2", "--port", "0", "--data", str(tmp_path / "data"))
    assert done.code == 1
    assert "--processes 2 requires PostgreSQL" in done.err
    assert "COMFYFLEET_CENTRAL_DATABASE_URL" in done.err
    assert not (tmp_path / "data").exists()
    done = comfyfleet("serve", "--processes", "0", "--data", str(tmp_path / "data"))
    assert "--processes must be between 1 and 64, not 0" in done.err
