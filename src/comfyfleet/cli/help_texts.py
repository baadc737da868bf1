"""Help texts of the commands that are imported only when they run."""

RUN = """Run a workflow and save its results.

Uploads the files that you specify. Input files that the workflow names are uploaded as well if they
are in its folder.
Without --server and --cloud, the built-in engine runs the workflow if it has all node types. The paths of
the results go to stdout. Progress and messages go to stderr. Ctrl-C cancels the run on the server.

```
comfyfleet run flow.json --image cat.png
comfyfleet run cat.png --server gpu1:8188 --server gpu2:8188 --seed 7
comfyfleet run flow.json --set 3.steps=30 --input 12.image=mask.png --dry-run
comfyfleet run flow.json --batch values.csv -o results
comfyfleet run flow.json --count 4 --seed random
comfyfleet run flow.json --server gpu1:8188 --detach
```

`comfyfleet inspect FILE` shows the values that can be set.
"""

INSPECT = """Show a workflow's inputs, outputs and requirements, and check them against a server.

```
comfyfleet inspect cat.png
comfyfleet inspect flow.json --server http://127.0.0.1:8188
comfyfleet inspect flow.json --json | jq -r '.takes[] | [.address, .value] | @tsv'
```
"""

CONVERT = """Convert a workflow to the prompt that ComfyUI's own editor would send.

The prompt goes to stdout as JSON. Messages go to stderr.

```
comfyfleet convert cat.png --server http://127.0.0.1:8188 -o cat.prompt.json
comfyfleet convert flow.json --object-info object_info.json --set 3.seed=7
comfyfleet convert flow.json --prompt "a fox" --seed 7 --bypass Upscale
curl -s https://example.com/flow.json | comfyfleet convert - | jq 'keys'
```

`comfyfleet inspect FILE` shows the values that can be set.
"""

WATCH = """Follow an earlier run and save its results.

With several servers, this command finds the one that has the run. Ctrl-C stops only the command,
and the run continues.

```
comfyfleet watch 0b2f7c1e-4c1d-4f6a-9d0e-3a5b8c7d9e10 --server gpu1:8188
```
"""

ENGINE = """Serve the built-in CPU engine, which speaks ComfyUI's protocol.

Any ComfyUI client can use it. It validates, queues, executes and caches prompts like ComfyUI
does, for nodes that need neither a model nor a GPU. Ctrl-C (or SIGTERM) stops it cleanly.
"""

SERVE = """Serve the control plane with its queue, its APIs and its background sweeps.

Without settings, it stores its databases (SQLite) and files in a folder. With
`COMFYFLEET_CENTRAL_DATABASE_URL`, `COMFYFLEET_TENANT_DATABASE_URLS` and `COMFYFLEET_STORAGE_URL`, any
number of control planes can share PostgreSQL and S3. Upgrade the databases first with
`comfyfleet db upgrade`. `COMFYFLEET_ADMIN_KEY` is the admin key. Without it, a key is generated at the first start
and printed once.

One process uses one core. `--processes N` runs N processes behind the same port, and requires PostgreSQL. A process that dies is
restarted, SIGHUP replaces the processes one by one without downtime, and SIGTERM stops all of them cleanly.

```
comfyfleet serve --data /var/lib/comfyfleet
comfyfleet serve --host 0.0.0.0 --port 80 --no-loops
comfyfleet serve --host 0.0.0.0 --processes 4
```
"""

WORKER = """Run jobs of a fleet on a ComfyUI, or on Comfy Cloud.

The worker connects to the control plane, the file storage and its ComfyUI, and needs no incoming connections. The fleet's
secret is read from `COMFYFLEET_FLEET_SECRET`. `COMFYFLEET_MAX_CONCURRENCY` (1) is the number of concurrent
prompts, and `COMFYFLEET_HEARTBEAT_SECONDS` (30) is the time between heartbeats.

While one prompt runs, the next job's files are uploaded and its prompt is queued in ComfyUI. After
a crash and restart, the worker resumes active runs. On SIGTERM, Ctrl-C or a spot notice, it finishes jobs that
can end in the remaining time, and requeues the rest. If an operator revokes the worker, it stops its run and exits with code 77.

A single ComfyUI leaves a large GPU mostly idle. With `--comfyui-command`, the worker starts ComfyUI itself,
and with `--per-gpu` it starts several on each GPU. Each one has the next port, its own folder and its own name (`gpu-1`, `gpu-2`),
and is one worker of the fleet. `auto` adds a server while jobs are waiting and the GPU has free memory, keeps it if more jobs
per minute are finished, and removes one when there is too little work or the memory has run out.

```
export COMFYFLEET_FLEET_SECRET=…     # printed by `comfyfleet admin fleets create gpus`
comfyfleet worker --control https://fleet.example.com --fleet gpus --backend http://127.0.0.1:8188
comfyfleet worker --control https://fleet.example.com --fleet cloud --cloud
comfyfleet worker --control https://fleet.example.com --fleet gpus --backend http://127.0.0.1:8188 \\
    --comfyui-command "python /opt/ComfyUI/main.py --port 8188"
comfyfleet worker --control https://fleet.example.com --fleet gpus --per-gpu auto --gpus all \\
    --comfyui-command "python /opt/ComfyUI/main.py --port {port} --output-directory {folder}/output \\
      --temp-directory {folder} --database-url sqlite:///{folder}/comfyui.db"
```
"""

DB = "Upgrade the databases to the newest schema, show their schema, or replace secrets."

ADMIN = """Operate a control plane: fleets, workflows, effects, workers, tenants, the queue, the ledger and the audit log.

Set `COMFYFLEET_URL` to the control plane's address, and `COMFYFLEET_KEY` to the admin key that it
printed at its first start. `--json` prints JSON instead of tables.

```
comfyfleet admin workflows register cat cat.json --property prompt:text=6.text
comfyfleet admin submit cat --set prompt="a black cat" --wait -o results
comfyfleet admin effects create cat cat --price 5 --publish
comfyfleet admin tenants create "Ada's films"
comfyfleet admin dispatches list --status queued
comfyfleet admin dispatches why 12
```
"""

UP = """Run everything in one process: the control plane, a worker, and a backend.

No other services and no settings are needed. This command uses SQLite and files in one folder, and the
built-in CPU engine unless you specify a ComfyUI. Each registered workflow that the backends can run
is assigned automatically. If you start it again with the same folder, it continues where it stopped.

```
comfyfleet up
comfyfleet up --data /srv/comfyfleet --backend http://127.0.0.1:8188
COMFYUI_BASE_URL=http://127.0.0.1:8188 comfyfleet up
```

Your own programs on this machine need no key, and jobs are free of charge. The web pages open with an address that signs in
once. `comfyfleet open` prints a new one.
"""

UPLOAD = """Upload files as your media. Prints one id per line.

Graphs, pipelines and effects accept the id in place of a file.

```
comfyfleet upload photo.png
comfyfleet pipeline run portraits.yaml --set photo=$(comfyfleet upload photo.png)
```
"""

OPEN = """Open the web pages of a running `comfyfleet up` in a browser, signed in as its owner.

Prints an address that signs in once. `up` prints such an address at each start. This command prints a new one, for
example when a browser's session has expired. It must run as a user with write access to the folder of `up`.

```
comfyfleet open
comfyfleet open --data /srv/comfyfleet --no-open
```
"""

GRAPH = """Run graphs, which combine several workflows, on all backends of the fleet.

Set `COMFYFLEET_URL` to the control plane's address, and `COMFYFLEET_KEY` to your API key (`cf_…`).
Graphs are JSON or YAML files.

```
comfyfleet graph validate album.yaml
comfyfleet graph quote album.yaml
comfyfleet graph run album.yaml --input photos=@a.png,@b.png -o results
comfyfleet graph runs --status running
comfyfleet graph show 0b2f7c1e-4c1d-4f6a-9d0e-3a5b8c7d9e10
comfyfleet graph rerun 0b2f7c1e-4c1d-4f6a-9d0e-3a5b8c7d9e10 --from soften -o again
comfyfleet graph draw 0b2f7c1e-4c1d-4f6a-9d0e-3a5b8c7d9e10 -o run.svg
comfyfleet graph answer 0b2f7c1e-4c1d-4f6a-9d0e-3a5b8c7d9e10 backend --backend worker:gpu-7
```
"""

PIPELINE = """Run pipelines, which generate candidates step by step: create, run, judge, export.

Set `COMFYFLEET_URL` to the control plane's address, and `COMFYFLEET_KEY` to your API key.

```
comfyfleet pipeline create examples/pipelines/soft-colours.yaml
comfyfleet pipeline run PIPELINE --base 3 --set colour=3368601 --set width=384 --wait
comfyfleet pipeline status RUN
comfyfleet pipeline approve RUN CANDIDATE
comfyfleet pipeline export RUN -o results
```
"""

EFFECTS = """Apply effects as a customer: list, show, run.

Set `COMFYFLEET_URL` to the control plane's address, and `COMFYFLEET_KEY` to your API key.

```
comfyfleet effects list
comfyfleet effects show soften
comfyfleet effects run soften photo.png --set size=320 -o results
```
"""

JOBS = """Manage your jobs: list, show, wait, cancel.

Set `COMFYFLEET_URL` to the control plane's address, and `COMFYFLEET_KEY` to your API key.

```
comfyfleet jobs list --status failed
comfyfleet jobs show JOB
comfyfleet jobs wait JOB -o results
comfyfleet jobs cancel JOB
```
"""

WALLET = "Show your balance, and the tokens added and spent in the last 30 days."

WEBHOOKS = """Manage webhooks, which report the end of jobs and runs: list, send a test message.

Set `COMFYFLEET_URL` to the control plane's address, and `COMFYFLEET_KEY` to your API key.

```
comfyfleet webhooks list
comfyfleet webhooks test WEBHOOK
```
"""

TRIGGERS = """Manage schedules and incoming webhooks that start graphs and pipelines: create, list, fire, pause.

Set `COMFYFLEET_URL` to the control plane's address, and `COMFYFLEET_KEY` to your API key.

```
comfyfleet triggers create nightly --graph album --cron "30 2 * * *" --timezone Europe/Berlin --tokens-per-day 200
comfyfleet triggers create shop --graph album --input photo=body.order.photo --tokens-per-day 500
comfyfleet triggers show TRIGGER
comfyfleet triggers fire TRIGGER --body @order.json
```
"""

NO_WORKER_REMEDY = (
    "Start a worker that can run it, or ask the operator to start one or to assign the workflow to "
    "a fleet that has one"
)
