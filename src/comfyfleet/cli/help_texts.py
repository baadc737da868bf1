"""Help of the commands that are imported only when they run."""

RUN = """Run a workflow and save what it makes.

Input files that the workflow names and that lie beside it are uploaded, and so are those that you
give. Without --server and --cloud the built-in engine runs it, if it has every node type. The paths of
the results go to stdout; progress and remarks go to stderr. Ctrl-C cancels the run on the server.

```
comfyfleet run flow.json --image cat.png
comfyfleet run cat.png --server gpu1:8188 --server gpu2:8188 --seed 7
comfyfleet run flow.json --set 3.steps=30 --input 12.image=mask.png --dry-run
comfyfleet run flow.json --batch values.csv -o results
comfyfleet run flow.json --count 4 --seed random
comfyfleet run flow.json --server gpu1:8188 --detach
```

`comfyfleet inspect FILE` shows what can be set.
"""

INSPECT = """Show what a workflow takes, makes and needs, and what of that a server lacks.

```
comfyfleet inspect cat.png
comfyfleet inspect flow.json --server http://127.0.0.1:8188
comfyfleet inspect flow.json --json | jq -r '.takes[] | [.address, .value] | @tsv'
```
"""

CONVERT = """Turn a workflow into the prompt that ComfyUI's own editor would send.

The prompt goes to stdout as JSON; what there is to say goes to stderr.

```
comfyfleet convert cat.png --server http://127.0.0.1:8188 -o cat.prompt.json
comfyfleet convert flow.json --object-info object_info.json --set 3.seed=7
comfyfleet convert flow.json --prompt "a fox" --seed 7 --bypass Upscale
curl -s https://example.com/flow.json | comfyfleet convert - | jq 'keys'
```

`comfyfleet inspect FILE` shows what can be set.
"""

WATCH = """Follow a run that was started before, and save what it makes.

With several servers the one is found that has it. Ctrl-C only stops watching: the run goes on.

```
comfyfleet watch 0b2f7c1e-4c1d-4f6a-9d0e-3a5b8c7d9e10 --server gpu1:8188
```
"""

ENGINE = """Serve the built-in CPU engine, which speaks ComfyUI's protocol.

Any ComfyUI client can use it: it validates, queues, executes and caches prompts as a ComfyUI
does, for nodes that need no model and no GPU. Ctrl-C (or SIGTERM) stops it in order.
"""

SERVE = """Serve the control plane: the queue, the API for workers and operators, the sweeps.

Without settings it keeps its databases (SQLite) and files in a folder. With
`COMFYFLEET_CENTRAL_DATABASE_URL`, `COMFYFLEET_TENANT_DATABASE_URLS` and `COMFYFLEET_STORAGE_URL` any
number of control planes share PostgreSQL and S3; bring the databases up to date first, with
`comfyfleet db upgrade`. The admin key is `COMFYFLEET_ADMIN_KEY`, else it is made at the first start
and printed once.

One process uses one core. `--processes N`, on PostgreSQL, keeps N of them behind the port: one that dies is
started again, SIGHUP replaces them one by one while the others serve, SIGTERM ends all in order.

```
comfyfleet serve --data /var/lib/comfyfleet
comfyfleet serve --host 0.0.0.0 --port 80 --no-loops
comfyfleet serve --host 0.0.0.0 --processes 4
```
"""

WORKER = """Put a GPU to work: lease jobs of a fleet and run them on a ComfyUI, or on Comfy Cloud.

It needs to reach the control plane, the file store and its ComfyUI; nobody needs to reach it. The fleet's
secret stands in `COMFYFLEET_FLEET_SECRET`; `COMFYFLEET_MAX_CONCURRENCY` (1) is how many prompts run at
once, `COMFYFLEET_HEARTBEAT_SECONDS` (30) how often it says that it lives.

While one prompt runs, the next job's files are brought to ComfyUI and its prompt is put behind. Killed
and started again, it goes on with what still runs. SIGTERM, Ctrl-C and a spot notice let it finish what
fits into the time that is left; the rest is handed back. Revoked by an operator, it stops its run and exits with 77.

One ComfyUI leaves a large GPU mostly idle. With `--comfyui-command` this command starts ComfyUI itself,
and with `--per-gpu` several on each GPU: each has the next port, a folder and a name of its own (`gpu-1`, `gpu-2`),
and is one worker of the fleet. `auto` tries one more while jobs wait and the GPU's memory has room, keeps it if more jobs
a minute are finished, and takes one away when there is too little to do or memory ran out.

```
export COMFYFLEET_FLEET_SECRET=…     # as `comfyfleet admin fleets create gpus` showed it
comfyfleet worker --control https://fleet.example.com --fleet gpus --backend http://127.0.0.1:8188
comfyfleet worker --control https://fleet.example.com --fleet cloud --cloud
comfyfleet worker --control https://fleet.example.com --fleet gpus --backend http://127.0.0.1:8188 \\
    --comfyui-command "python /opt/ComfyUI/main.py --port 8188"
comfyfleet worker --control https://fleet.example.com --fleet gpus --per-gpu auto --gpus all \\
    --comfyui-command "python /opt/ComfyUI/main.py --port {port} --output-directory {folder}/output \\
      --temp-directory {folder} --database-url sqlite:///{folder}/comfyui.db"
```
"""

DB = "Bring the databases to the newest schema, or see which they have."

ADMIN = """Operate a control plane: fleets, workflows, effects, workers, tenants, the queue, the books, the audit.

`COMFYFLEET_URL` says where it is, `COMFYFLEET_KEY` is the admin key that it printed at its first
start. Tables are for people; `--json` is for programs.

```
comfyfleet admin workflows register cat cat.json --property prompt:text=6.text
comfyfleet admin submit cat --set prompt="a black cat" --wait -o results
comfyfleet admin effects create cat cat --price 5 --publish
comfyfleet admin tenants create "Ada's films"
comfyfleet admin dispatches list --status queued
comfyfleet admin dispatches why 12
```
"""

UP = """Run everything in one process: control plane, a worker, and a backend for it.

No services, no settings: SQLite and files in one folder, and the built-in CPU engine unless a
ComfyUI is named. Each workflow that is registered and that the backends can run is assigned by
itself. The same folder again goes on where it stopped.

```
comfyfleet up
comfyfleet up --data /srv/comfyfleet --backend http://127.0.0.1:8188
```
"""

GRAPH = """Run graphs: workflows of workflows, over all backends of the fleet.

`COMFYFLEET_URL` says where the control plane is, `COMFYFLEET_KEY` is an API key of yours (`cf_…`).
Graphs are JSON or YAML files.

```
comfyfleet graph validate album.yaml
comfyfleet graph quote album.yaml
comfyfleet graph run album.yaml --input photos=@a.png,@b.png -o results
comfyfleet graph runs --status running
comfyfleet graph show 0b2f7c1e-4c1d-4f6a-9d0e-3a5b8c7d9e10
comfyfleet graph answer 0b2f7c1e-4c1d-4f6a-9d0e-3a5b8c7d9e10 backend --backend worker:gpu-7
```
"""

PIPELINE = """Runs that make candidates step by step, day and night: create, run, judge, export.

`COMFYFLEET_URL` says where the control plane is, `COMFYFLEET_KEY` is a key of yours.

```
comfyfleet pipeline create examples/pipelines/soft-colours.yaml
comfyfleet pipeline run PIPELINE --base 3 --set colour=3368601 --set width=384 --wait
comfyfleet pipeline status RUN
comfyfleet pipeline approve RUN CANDIDATE
comfyfleet pipeline export RUN -o results
```
"""
