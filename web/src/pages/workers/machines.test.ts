import { expect, test } from "vitest"
import type { Matrix, MatrixWorker, WorkerJob, WorkerSeen } from "@/api/schema"
import {
  abilitiesOf,
  byFleet,
  cellOf,
  conditionOf,
  gapsOf,
  type JobNews,
  loopbackAddressIn,
  modelName,
  reachableAddress,
  runningJob,
  sortedWorkers,
  withJobs,
  withWorkers,
} from "./machines"

function job(id: string, changes: Partial<WorkerJob> = {}): WorkerJob {
  return {
    job_id: id,
    dispatch_id: 1,
    tenant_id: "t",
    workflow: "relight",
    attempt: 1,
    started_at: null,
    percent: null,
    node: null,
    ...changes,
  }
}

function worker(name: string, changes: Partial<WorkerSeen> = {}): WorkerSeen {
  return {
    worker_id: name,
    fleet: "gpu/production",
    state: "online",
    is_approved: true,
    is_draining: false,
    current_load: 0,
    max_concurrency: 1,
    capabilities: [],
    providers: [],
    models_loaded: [],
    problem: null,
    registration_source: "secret",
    protocol_version: 1,
    last_seen_at: "2031-05-01T12:00:00Z",
    silent_since: null,
    created_at: "2031-05-01T12:00:00Z",
    backend_kind: null,
    backend_version: null,
    gpu: null,
    gpu_memory_bytes: null,
    reading: null,
    read_at: null,
    jobs: [],
    ...changes,
  }
}

function news(id: string, changes: Partial<JobNews> = {}): JobNews {
  return {
    id,
    dispatch_id: 1,
    tenant_id: "t",
    workflow: "relight",
    status: "leased",
    priority: 0,
    attempt: 1,
    worker_id: "gpu-1",
    percent: 40,
    node: "KSampler",
    error: null,
    started_at: null,
    ended_at: null,
    ...changes,
  }
}

test("a worker with a job is busy, regardless of its last reported load", () => {
  expect(conditionOf(worker("a"))).toBe("idle")
  expect(conditionOf(worker("a", { current_load: 1 }))).toBe("busy")
  expect(conditionOf(worker("a", { jobs: [job("j")] }))).toBe("busy")
  expect(conditionOf(worker("a", { state: "draining", jobs: [job("j")] }))).toBe("draining")
  expect(conditionOf(worker("a", { state: "pending" }))).toBe("pending")
  expect(conditionOf(worker("a", { state: "faulty" }))).toBe("faulty")
})

test("a worker whose report is overdue isn't shown as idle", () => {
  const silent = { silent_since: "2031-05-01T12:00:00Z" }
  expect(conditionOf(worker("a", silent))).toBe("silent")
  expect(conditionOf(worker("a", { ...silent, jobs: [job("j")] }))).toBe("silent")
  expect(conditionOf(worker("a", { ...silent, state: "draining" }))).toBe("draining")
  expect(conditionOf(worker("a", { ...silent, state: "offline" }))).toBe("offline")
  expect(conditionOf(worker("a", { ...silent, state: "revoked" }))).toBe("revoked")
})

test("a worker's current job is the started one, not the next one that it holds", () => {
  const next = job("next")
  const started = job("begun", { started_at: "2031-05-01T12:00:00Z" })
  expect(runningJob(worker("a", { jobs: [next, started] }))).toBe(started)
  expect(runningJob(worker("a", { jobs: [next] }))).toBe(next)
  expect(runningJob(worker("a"))).toBeUndefined()
})

test("pending workers come first, revoked ones last, and the others in natural name order", () => {
  const all = [
    worker("gpu-10"),
    worker("gpu-2"),
    worker("a", { state: "revoked" }),
    worker("z", { state: "pending" }),
  ]
  expect(sortedWorkers(all).map((worker) => worker.worker_id)).toEqual(["z", "gpu-2", "gpu-10", "a"])
})

test("a fleet without workers is listed as well", () => {
  const fleet = {
    slug: "video",
    stage: "staging",
    max_workers: null,
    approval: "auto",
    workers: 0,
    workflows: [],
    object_info_hash: null,
    starts_within_seconds: null,
    created_at: "",
  }
  const groups = byFleet([worker("a")], [fleet])
  expect(groups.map((group) => [group.name, group.workers.length])).toEqual([
    ["gpu/production", 1],
    ["video/staging", 0],
  ])
})

test("events update workers, remove departed ones, and report unknown ones", () => {
  const load = { current_load: 0, max_concurrency: 1, models_loaded: ["flux"] }
  const report = { fleet: "gpu/production", ...load, silent_since: null }
  const seen = [worker("gpu-1"), worker("gpu-2")]
  const changed = withWorkers(seen, {
    workers: [{ worker_id: "gpu-1", state: "draining", ...report }],
    gone: ["gpu-2"],
  })
  expect(changed.isUnknown).toBe(false)
  expect(changed.workers.map((worker) => [worker.worker_id, worker.state, worker.models_loaded])).toEqual([
    ["gpu-1", "draining", ["flux"]],
  ])
  const joined = withWorkers(seen, {
    workers: [{ worker_id: "gpu-3", state: "online", ...report }],
    gone: [],
  })
  expect(joined.isUnknown).toBe(true)
})

test("a job starts on a worker, progresses, moves to another worker, and ends", () => {
  const seen = [worker("gpu-1"), worker("gpu-2")]
  const started = withJobs(seen, [news("j")])
  expect(started[0]?.jobs).toMatchObject([{ job_id: "j", percent: 40, node: "KSampler" }])
  const further = withJobs(started, [news("j", { percent: 80 })])
  expect(further[0]?.jobs).toMatchObject([{ percent: 80 }])
  const moved = withJobs(further, [news("j", { worker_id: "gpu-2", percent: null })])
  expect(moved.map((worker) => worker.jobs.length)).toEqual([0, 1])
  const ended = withJobs(moved, [news("j", { status: "completed", worker_id: "gpu-2" })])
  expect(ended.map((worker) => worker.jobs.length)).toEqual([0, 0])
  expect(withJobs(ended, [news("other", { status: "completed" })])).toBe(ended)
})

function row(name: string, changes: Partial<MatrixWorker>): MatrixWorker {
  const worker = { fleet: "gpu/production", state: "online", can_run: [], missing: {}, unknown: [] }
  return { worker_id: name, ...worker, ...changes }
}

const MATRIX: Matrix = {
  workflows: [
    { workflow: "relight", fleets: ["gpu/production"], able: 1, online: 2 },
    { workflow: "upscale", fleets: ["gpu/production"], able: 0, online: 2 },
  ],
  workers: [
    row("gpu-1", { can_run: ["relight"], missing: { upscale: { models: ["4x.pth"], node_types: [] } } }),
    row("gpu-2", {
      missing: { relight: { models: ["lamp.safetensors"] }, upscale: { models: ["4x.pth"] } },
    }),
    row("gpu-3", { state: "offline", unknown: ["relight", "upscale"] }),
  ],
  is_whole: true,
}

test("for online workers, it counts who can run a workflow and what the others lack", () => {
  const [relight, upscale] = abilitiesOf(MATRIX, "gpu/production", ["relight", "upscale"])
  expect(relight).toMatchObject({
    able: 1,
    online: 2,
    everywhere: null,
    first: { worker: "gpu-2", what: "lamp.safetensors", more: 0 },
  })
  expect(upscale).toMatchObject({ able: 0, online: 2, everywhere: "4x.pth" })
})

test("draining workers don't count as offline", () => {
  const workers = MATRIX.workers.map((worker, at) => ({
    ...worker,
    state: at === 0 ? "draining" : "offline",
  }))
  const [relight] = abilitiesOf({ ...MATRIX, workers }, "gpu/production", ["relight"])
  expect(relight).toMatchObject({ able: 0, online: 0, draining: 1 })
})

test("a loopback address is detected, and a replacement is suggested", () => {
  const command = (url: string) => `export A=B\ncomfyfleet worker --control ${url} --fleet gpu`
  expect(loopbackAddressIn(command("http://127.0.0.1:8000"))).toBe("http://127.0.0.1:8000")
  expect(loopbackAddressIn(command("'http://[::1]:8000/'"))).toBe("http://[::1]:8000/")
  expect(loopbackAddressIn(command("https://fleet.example.org"))).toBeNull()
  expect(reachableAddress("http://localhost:8000", "http://10.0.0.4:8000")).toBe("http://10.0.0.4:8000")
  expect(reachableAddress("http://127.0.0.1:8000", "http://127.0.0.1:8000")).toBe("http://192.168.1.20:8000")
})

test("items that are missing everywhere come first", () => {
  expect(gapsOf(MATRIX).map(({ what, workers, isEverywhere }) => [what, workers, isEverywhere])).toEqual([
    ["4x.pth", ["gpu-1", "gpu-2"], true],
    ["lamp.safetensors", ["gpu-2"], false],
  ])
})

test("each cell has one of four values", () => {
  const cells = MATRIX.workers.map((worker) => cellOf(worker, "relight"))
  expect([...cells, cellOf(row("x", {}), "relight")]).toEqual(["can", "cannot", "unknown", "not"])
})

test("models are shown without folder and extension", () => {
  expect([modelName("SDXL/base_1.0.safetensors"), modelName("flux")]).toEqual(["base_1.0", "flux"])
})
