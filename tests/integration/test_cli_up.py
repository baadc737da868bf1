"""`comfyfleet up` and `comfyfleet admin`: everything in one process, worked from the command line."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import PIL.Image
import pytest
from tests.support.server.command_process import CommandProcess, executed, started
from tests.support.server.commands import EXAMPLES, NEGATIVE, SOFTEN, Result, comfyfleet

from comfyfleet.engine import serve_in_thread

PHOTO = str(EXAMPLES / "inputs" / "photo.png")
KEY = r"export COMFYFLEET_URL=(\S+) COMFYFLEET_KEY=(\w{64})"
Admin = Callable[..., Result]


def admin_of(running: CommandProcess) -> Admin:
    found = running.wait_for_line(KEY)
    return with_key(found[1], found[2])


def with_key(url: str, key: str) -> Admin:
    def admin(*arguments: str) -> Result:
        environ = {"COMFYFLEET_URL": url, "COMFYFLEET_KEY": key}
        return comfyfleet("admin", *arguments, environ=environ, width=200)

    return admin


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandProcess]:
    with started("up", "--port", "0", folder=tmp_path_factory.mktemp("up")) as running:
        running.wait_for_line("Worker built-in in fleet default/production")
        yield running


@pytest.fixture(scope="module")
def admin(up: CommandProcess) -> Admin:
    """With two workflows, of which one takes a file."""
    admin = admin_of(up)
    registered = admin(
        "workflows", "register", "negative", NEGATIVE, "--property", "width:integer=2.width", "--output", "4"
    )  # fmt: skip
    assert registered.code == 0, registered.err
    assert "workflow negative has version 1" in registered.err
    soften = admin("workflows", "register", "soften", SOFTEN, "--property", "input:image=1.image")
    assert soften.code == 0, soften.err
    return admin


# Every process that finds this file on its path runs as if only the extras of `make demo` were installed.
WITHOUT_OTHER_EXTRAS = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("asyncpg", "boto3", "botocore", "httptools"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_it_works_with_no_more_than_the_demo_installs(tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(WITHOUT_OTHER_EXTRAS)
    path = str(tmp_path / "path")
    with executed("up", "--port", "0", folder=tmp_path, PYTHONPATH=path) as running:
        admin = admin_of(running)
        running.wait_for_line("Worker built-in in fleet default/production")
        registered = admin("workflows", "register", "negative", NEGATIVE, "--output", "4")
        assert registered.code == 0, registered.err
        done = admin("submit", "negative", "-o", str(tmp_path / "out"))
        assert done.code == 0, done.err
        assert list((tmp_path / "out").iterdir())


def test_a_job_is_submitted_waited_for_and_saved(admin: Admin, tmp_path: Path) -> None:
    done = admin(
        "submit", "negative", "--set", "width=96", "--count", "3", "-o", str(tmp_path / "out")
    )
    assert done.code == 0, done.err
    paths = done.out.split()
    assert len(paths) == 3
    assert {Path(path).name for path in paths} == {f"negative_384{n}.png" for n in ("", "-2", "-3")}
    for path in paths:
        with PIL.Image.open(path) as picture:
            assert picture.width == 48
    assert "3 of 3 jobs completed: 3 files" in done.err


def test_a_file_goes_up_with_its_job(admin: Admin, tmp_path: Path) -> None:
    done = admin("submit", "soften", "--file", f"input={PHOTO}", "--wait", "--json")
    assert done.code == 0, done.err
    (job,) = done.json["jobs"]
    assert len(job["outputs"]) == 2
    for output in job["outputs"]:
        assert output["content_type"] == "image/png"
        assert httpx.get(output["url"]).content.startswith(b"\x89PNG")


def test_what_was_registered_is_assigned_by_itself(admin: Admin) -> None:
    assert admin("submit", "negative", "--wait").code == 0
    (fleet,) = admin("fleets", "list", "--json").json["fleets"]
    assert set(fleet["workflows"]) == {"negative", "soften"}
    for command in (("fleets", "list"), ("fleets", "show", "default")):
        shown = admin(*command).out
        assert "default" in shown
        assert "negative" in shown
    assert "not known yet" in shown
    assert admin("fleets", "show", "default", "--json").json["model_switches"] == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("submit", "nothing"), "workflow 'nothing' was not found"),
        (
            ("submit", "negative", "--set", "depth=3"),
            "no property depth; available properties: width",
        ),
        (("submit", "negative", "--set", "width=wide"), "width must be a number"),
        (("submit", "negative", "--set", "width"), "is invalid"),
        (("submit", "negative", "--file", "width=x.png"), "no property width"),
        (("submit", "soften", "--set", "input=x.png"), "--file input=PATH"),
        (("submit", "soften", "--file", "input=none.png"), "none.png"),
        (("dispatches", "show", "999999"), "999999"),
        (("workers", "drain", "nobody"), "worker nobody was not found"),
        (("workflows", "register", "x", NEGATIVE, "--property", "a=b"), "NAME:TYPE=NODE.INPUT"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    admin: Admin, arguments: tuple[str, ...], problem: str
) -> None:
    result = admin(*arguments)
    assert result.code == 1
    assert problem in result.lines[0], result.err


def test_which_workers_can_run_a_workflow_is_listed(admin: Admin) -> None:
    assert admin("fleets", "assign", "default", "soften", "--add").code == 0
    result = admin("workflows", "workers", "soften")
    assert "built-in" in result.out, result.err
    assert "missing models" in result.out


def test_what_a_fleet_no_longer_runs_is_told(admin: Admin) -> None:
    assert admin("fleets", "create", "narrow").code == 0
    assert admin("fleets", "assign", "narrow", "soften").lines[-1].endswith("runs soften")
    result = admin("fleets", "assign", "narrow", "negative")
    assert result.lines[-1] == "fleet narrow/production runs negative, and no longer soften"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("submit", "negativ"), "Did you mean: negative?"),
        (("workflows", "show", "sofen"), "Did you mean: soften?"),
        (("workers", "show", "buildin"), "Did you mean: built-in?"),
        (("fleets", "assign", "defalt", "--add"), "Did you mean: default?"),
        (("submit", "zzz"), "Available: negative, soften"),
    ],
)
def test_a_name_that_is_not_there_is_told_with_the_closest(
    admin: Admin, arguments: tuple[str, ...], hint: str
) -> None:
    result = admin(*arguments)
    assert result.code == 1
    assert hint in result.lines[-1], result.err


def test_a_tenant_that_is_not_there_is_told_in_words(admin: Admin) -> None:
    result = admin("tenants", "show", "defaul")
    assert result.code == 1
    assert "tenant defaul was not found" in result.lines[0]
    assert "(default)" in result.lines[-1]


def test_a_dispatch_is_shown_with_its_attempts(admin: Admin) -> None:
    assert admin("submit", "negative", "--wait").code == 0
    newest = admin("dispatches", "list", "--status", "completed", "--limit", "1", "--json").json
    (row,) = newest["dispatches"]
    shown = admin("dispatches", "show", str(row["id"]))
    assert shown.code == 0, shown.err
    assert "completed" in shown.out
    assert "worker:built-in" in shown.out
    assert "lease" in shown.out
    assert "ended" in admin("dispatches", "why", str(row["id"])).out
    assert "only failed or cancelled jobs" in admin("dispatches", "retry", str(row["id"])).err


def test_a_list_in_a_pipe_can_be_searched_line_by_line(up: CommandProcess, admin: Admin) -> None:
    assert admin("submit", "negative", "--count", "2", "--wait").code == 0
    url, key = up.wait_for_line(KEY).groups()
    environ = {"COMFYFLEET_URL": url, "COMFYFLEET_KEY": key}
    arguments = ("admin", "dispatches", "list", "--status", "completed", "--limit", "2")
    heading, *rows = comfyfleet(*arguments, environ=environ, width=80).out.splitlines()
    assert len(rows) == 2
    for row in rows:
        assert " completed " in row
        assert " built-in " in row
        assert re.search(r" \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", row)
    assert "priority" in heading


def test_jobs_that_wait_say_why_and_can_be_changed(admin: Admin) -> None:
    assert admin("workflows", "pause", "negative").code == 0
    try:
        job = admin("submit", "negative").out.strip()
        shown = admin("jobs", "show", job, "--json").json
        number = str(shown["dispatch"]["id"])
        assert "paused" in admin("dispatches", "why", number).out
        raised = admin("dispatches", "reprioritise", number, "-3")
        assert raised.code == 0, raised.err
        assert admin("jobs", "show", job, "--json").json["dispatch"]["priority"] == -3
        assert "cancelled" in admin("dispatches", "cancel", number).err
        assert "cancelled" in admin("jobs", "show", job).out
        again = admin("dispatches", "retry", number)
        assert again.code == 0, again.err
        assert len(again.out.strip()) == 36
    finally:
        assert admin("workflows", "resume", "negative").code == 0


def test_workers_tenants_and_upkeep_answer(admin: Admin) -> None:
    assert "built-in" in admin("workers", "list").out
    assert "comfyfleet engine" in admin("workers", "show", "built-in").out
    assert "default" in admin("tenants", "list").out
    made = admin("tenants", "create", "Ada & Co", "--json").json
    assert admin("tenants", "limits", made["id"], "--max-priority", "3").code == 0
    assert "no jobs are set aside" in admin("poisoned").err
    assert "0 dispatches ended, 0 dispatches created" in admin("reconcile").err
    assert "maintenance is on" in admin("maintenance", "on").err
    assert "maintenance is on" in admin("maintenance").err
    assert "maintenance is off" in admin("maintenance", "off").err


def test_the_audit_is_filtered_and_exported(admin: Admin) -> None:
    assert admin("submit", "negative", "--wait").code == 0
    page = admin("audit", "--action", "complete", "--limit", "1", "--json").json
    (entry,) = page["entries"]
    assert (entry["action"], entry["actor"]) == ("complete", "worker:built-in")
    lines = admin("audit", "--subject", entry["subject"], "--export").out.splitlines()
    assert {json.loads(line)["action"] for line in lines} >= {"submit", "lease", "complete"}


def test_a_wrong_key_is_told_what_the_right_one_is(up: CommandProcess) -> None:
    url = up.wait_for_line(KEY)[1]
    result = with_key(url, "wrong")("fleets", "list")
    assert result.code == 1
    assert "this is not an operator's key" in result.err
    assert "COMFYFLEET_KEY must be" in result.err


def test_the_same_folder_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with started("up", "--port", "0", folder=tmp_path) as first:
        admin = admin_of(first)
        key = first.wait_for_line(KEY)[2]
        assert admin("workflows", "register", "negative", NEGATIVE).code == 0
        assert admin("submit", "negative", "--wait").code == 0
        assert first.stop(signal.SIGINT) == 0
        assert first.said[-1] == "Stopped"
    with started("up", "--port", "0", folder=tmp_path) as again:
        url = again.wait_for_line(r"Control plane at (\S+)")[1]
        admin = with_key(url, key)
        assert admin("submit", "negative", "--wait").code == 0
        assert len(admin("dispatches", "list", "--json").json["dispatches"]) == 2
        assert again.stop(signal.SIGTERM) == 0
        assert not any("COMFYFLEET_KEY" in line for line in again.said)
    secret = tmp_path / "comfyfleet-data" / "fleet.secret"
    assert secret.stat().st_mode & 0o077 == 0


def test_up_creates_its_data_folder_if_databases_and_files_are_elsewhere(tmp_path: Path) -> None:
    elsewhere = {
        "COMFYFLEET_CENTRAL_DATABASE_URL": f"sqlite:///{tmp_path / 'central.sqlite3'}",
        "COMFYFLEET_TENANT_DATABASE_URLS": f"a=sqlite:///{tmp_path / 'a.sqlite3'}",
        "COMFYFLEET_STORAGE_URL": (tmp_path / "objects").as_uri(),
    }
    assert comfyfleet("db", "upgrade", environ=elsewhere).code == 0
    data = tmp_path / "new" / "data"
    arguments = ("up", "--port", "0", "--no-worker", "--data", str(data))
    with started(*arguments, folder=tmp_path, **elsewhere) as running:
        assert admin_of(running)("fleets", "list").code == 0
        assert running.stop() == 0
    assert data.stat().st_mode & 0o077 == 0
    assert (data / "fleet.secret").is_file()


def test_up_without_a_worker_waits_for_others(tmp_path: Path) -> None:
    with started("up", "--port", "0", "--no-worker", folder=tmp_path) as running:
        admin = admin_of(running)
        assert "no worker has joined yet" in admin("workers", "list").err
        assert running.stop() == 0
    both = comfyfleet("up", "--no-worker", "--backend", "http://127.0.0.1:1")
    assert both.code == 1


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("http://localhost:8123/", "http://127.0.0.1:8123 is the address of comfyfleet itself"),
        ("ws://gpu1:8188", "ws://gpu1:8188: use an http:// or https:// address"),
    ],
)
def test_what_can_be_no_comfyui_is_refused_before_anything_starts(
    tmp_path: Path, backend: str, says: str
) -> None:
    data = tmp_path / "data"
    told = comfyfleet("up", "--port", "8123", "--data", str(data), "--backend", backend)
    assert (told.code, told.lines[0]) == (1, f"error: --backend {says}")
    assert not data.exists()


def test_up_puts_a_comfyui_to_work_that_runs_elsewhere(tmp_path: Path) -> None:
    with (
        serve_in_thread(data=tmp_path / "comfyui") as comfyui,
        started("up", "--port", "0", "--backend", comfyui.url, folder=tmp_path) as running,
    ):
        running.wait_for_line(f"in fleet default/production on ComfyUI at {comfyui.url}")
        admin = admin_of(running)
        assert admin("workflows", "register", "negative", NEGATIVE).code == 0
        assert admin("submit", "negative", "--wait").code == 0
        assert running.stop() == 0
    assert list((tmp_path / "comfyui" / "output").iterdir())


def test_up_takes_its_comfyui_from_the_environment(tmp_path: Path) -> None:
    with (
        serve_in_thread(data=tmp_path / "comfyui") as comfyui,
        started("up", "--port", "0", folder=tmp_path, COMFYUI_BASE_URL=comfyui.url) as running,
    ):
        running.wait_for_line(f"in fleet default/production on ComfyUI at {comfyui.url}")


def test_up_shows_its_machines_unless_it_is_told_not_to(
    up: CommandProcess, admin: Admin, tmp_path: Path
) -> None:
    assert admin("submit", "negative", "--wait").code == 0
    assert backend_names(up) == ["worker:built-in"]
    with started(
        "up", "--no-worker", "--port", "0", folder=tmp_path, COMFYFLEET_SHOW_BACKENDS="no"
    ) as hidden:
        hidden.wait_for_line("Any ComfyUI client can use")
        assert backend_names(hidden) == ["fleet:default/production"]


def test_the_workers_of_up_keep_to_the_limit_of_whole_jobs(tmp_path: Path) -> None:
    steps = {"steps": 100, "step_ms": 100, "previews": False}
    prompt = {
        "1": {"class_type": "ComfyfleetSteps", "inputs": steps},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "s"}},
    }
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(prompt))
    with started("up", "--port", "0", folder=tmp_path, COMFYUI_TIMEOUT="1") as running:
        admin = admin_of(running)
        assert admin("workflows", "register", "slow", str(file)).code == 0
        done = admin("submit", "slow", "--wait", "--json")
    (job,) = done.json["jobs"]
    assert job["status"] == "failed", done.err
    assert "limit of 1 s" in str(job)


def backend_names(running: CommandProcess) -> list[str]:
    """As the user who started `up` sees them."""
    answer = httpx.get(f"{running.wait_for_line(KEY)[1]}/api/backends")
    return [backend["name"] for backend in answer.json()["backends"]]


@pytest.mark.parametrize(
    "name",
    ["BASE_URL", "TIMEOUT", "MAX_RETRIES", "POLL_INTERVAL", "SUBMIT_INTERVAL"],
)
@pytest.mark.parametrize(
    "command",
    [("up", "--no-worker"), ("worker", "--control", "http://127.0.0.1:1", "--fleet", "gpus")],
    ids=["up", "worker"],
)
def test_a_comfyui_variable_that_makes_no_sense_is_an_error_at_the_start(
    tmp_path: Path, command: tuple[str, ...], name: str
) -> None:
    told = comfyfleet(
        *command,
        *(("--data", str(tmp_path / "data")) if command[0] == "up" else ()),
        environ={"COMFYUI_BASE_URL": "http://127.0.0.1:1", f"COMFYUI_{name}": "soon"},
    )
    assert told.code == 1
    assert f"COMFYUI_{name} must be" in told.lines[0]
    assert "not 'soon'" in told.lines[0]
    assert not (tmp_path / "data").exists()


def test_a_job_outlives_the_death_of_the_whole_process(tmp_path: Path) -> None:
    steps = {"steps": 20, "step_ms": 100, "previews": False}
    prompt = {
        "1": {"class_type": "ComfyfleetSteps", "inputs": steps},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "s"}},
    }
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(prompt))
    with started("up", "--port", "0", folder=tmp_path) as first:
        admin = admin_of(first)
        url, key = first.wait_for_line(KEY).groups()
        assert admin("workflows", "register", "slow", str(file)).code == 0
        job = admin("submit", "slow").out.strip()
        wait_for(lambda: admin("jobs", "show", job, "--json").json["status"] == "processing")
        assert first.stop(signal.SIGKILL) != 0
    with started("up", "--port", url.rpartition(":")[2], folder=tmp_path) as again:
        again.wait_for_line("Control plane at")
        admin = with_key(url, key)
        wait_for(lambda: admin("jobs", "show", job, "--json").json["status"] == "completed")
        assert again.stop() == 0


def wait_for(done: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.2)


def without(module: str, folder: Path) -> str:
    """A folder for PYTHONPATH, in which that package is not installed."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    return str(folder)


def test_a_start_that_fails_makes_no_key_that_nobody_has_seen(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bare = without("av", tmp_path_factory.mktemp("bare"))
    with executed("up", "--port", "0", folder=tmp_path, PYTHONPATH=bare) as failed:
        failed.wait_for_line("error: the built-in engine needs av, which is not installed")
        failed.wait_for_line(r'pip install "comfyfleet\[engine\]"')
        assert failed.process.wait(60) == 1
    with started("up", "--port", "0", "--no-worker", folder=tmp_path) as running:
        assert admin_of(running)("fleets", "list").code == 0
        assert running.stop() == 0


def test_the_key_is_shown_before_anything_else_can_go_wrong(tmp_path: Path) -> None:
    data = tmp_path / "comfyfleet-data"
    data.mkdir()
    (data / "fleet.secret").mkdir()  # so that the next step fails
    with started("up", "--port", "0", folder=tmp_path) as failed:
        url, key = failed.wait_for_line(KEY).groups()
        assert url
        assert failed.process.wait(30) != 0
    (data / "fleet.secret").rmdir()
    with started("up", "--port", "0", "--no-worker", folder=tmp_path) as running:
        url = running.wait_for_line(r"Control plane at (\S+)")[1]
        assert with_key(url, key)("fleets", "list").code == 0


def test_a_lost_admin_key_is_replaced(tmp_path: Path) -> None:
    data = str(tmp_path / "comfyfleet-data")
    nothing = comfyfleet("db", "new-admin-key", "--data", data)
    assert nothing.code == 1
    assert not Path(data).exists()
    with started("up", "--port", "0", "--no-worker", folder=tmp_path) as running:
        lost = running.wait_for_line(KEY)[2]
        assert "already serves" in comfyfleet("db", "new-admin-key", "--data", data).err
        assert running.stop() == 0
    made = comfyfleet("db", "new-admin-key", "--data", data)
    assert made.code == 0, made.err
    with started("up", "--port", "0", "--no-worker", folder=tmp_path) as running:
        url = running.wait_for_line(r"Control plane at (\S+)")[1]
        running.wait_for_line("comfyfleet db new-admin-key")
        assert with_key(url, made.out.strip())("fleets", "list").code == 0
        assert with_key(url, lost)("fleets", "list").code == 1
        audit = with_key(url, made.out.strip())("audit", "--action", "admin_key_replaced", "--json")
        assert len(audit.json["entries"]) == 1
