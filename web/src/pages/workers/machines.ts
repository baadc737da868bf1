/** Groups, orders and updates the workers for the pages about machines, and determines which worker
 * can run which workflow. */

import type { FleetAnswer, Matrix, MatrixWorker, WorkerJob, WorkerSeen } from "@/api/schema"
import type { JobEvent } from "@/pages/jobs/rows"
import type { State } from "@/ui"

export type Condition = "pending" | "busy" | "draining" | "idle" | "silent" | "faulty" | "offline" | "revoked"

/** The conditions in list order: workers that need an operator's decision first, revoked ones
 * last. */
export const CONDITIONS: readonly Condition[] = [
  "pending",
  "faulty",
  "offline",
  "silent",
  "busy",
  "draining",
  "idle",
  "revoked",
]

export const STATE_OF: Readonly<Record<Condition, State>> = {
  pending: "waiting",
  busy: "running",
  draining: "running",
  idle: "queued",
  silent: "waiting",
  faulty: "failed",
  offline: "failed",
  revoked: "cancelled",
}

type WorkerReport = Pick<WorkerSeen, "state" | "current_load" | "jobs" | "silent_since">

export function conditionOf(worker: WorkerReport): Condition {
  if (worker.state !== "online")
    return CONDITIONS.find((condition) => condition === worker.state) ?? "offline"
  // A silent worker may be offline, so its last report of idle or busy no longer counts.
  if (worker.silent_since) return "silent"
  return worker.current_load > 0 || worker.jobs.length > 0 ? "busy" : "idle"
}

/** Returns the job that the worker is running. A worker may also hold its next job, which hasn't
 * started. */
export function runningJob(worker: Pick<WorkerSeen, "jobs">): WorkerJob | undefined {
  return worker.jobs.find((job) => job.started_at !== null) ?? worker.jobs[0]
}

const names = new Intl.Collator(undefined, { numeric: true })

/** Sorts workers: pending ones first and revoked ones last, otherwise by name, so that no row
 * moves when a job starts or ends. */
export function sortedWorkers(workers: readonly WorkerSeen[]): WorkerSeen[] {
  const rank = (worker: WorkerSeen) => (worker.state === "pending" ? 0 : worker.state === "revoked" ? 2 : 1)
  return [...workers].sort((a, b) => rank(a) - rank(b) || names.compare(a.worker_id, b.worker_id))
}

export interface FleetGroup {
  readonly name: string
  readonly fleet: FleetAnswer | null
  readonly workers: readonly WorkerSeen[]
}

export function fleetName(fleet: { slug: string; stage: string }): string {
  return `${fleet.slug}/${fleet.stage}`
}

const LOOPBACK = /^(127\.[\d.]+|localhost|\[::1\]|0\.0\.0\.0|\[::\])$/

/** Returns the control plane's address in a command if it is a loopback address, which other
 * machines can't reach. */
export function loopbackAddressIn(command: string): string | null {
  const address = /--control '?([^\s']+)/.exec(command)?.[1]
  return address && URL.canParse(address) && LOOPBACK.test(new URL(address).hostname) ? address : null
}

/** Returns the address of this page's server if other machines can reach it, otherwise an
 * example. */
export function reachableAddress(address: string, here: string = window.location.origin): string {
  if (!LOOPBACK.test(new URL(here).hostname)) return here
  const { protocol, port } = new URL(address)
  return `${protocol}//192.168.1.20${port && `:${port}`}`
}

/** Groups workers by fleet, including fleets without workers. */
export function byFleet(workers: readonly WorkerSeen[], fleets: readonly FleetAnswer[]): FleetGroup[] {
  const fleetsByName = new Map(fleets.map((fleet) => [fleetName(fleet), fleet]))
  const all = new Set([...fleetsByName.keys(), ...workers.map((worker) => worker.fleet)])
  return [...all].sort(names.compare).map((name) => ({
    name,
    fleet: fleetsByName.get(name) ?? null,
    workers: sortedWorkers(workers.filter((worker) => worker.fleet === name)),
  }))
}

export function countOf(workers: readonly WorkerSeen[], ...conditions: readonly Condition[]): number {
  return workers.filter((worker) => conditions.includes(conditionOf(worker))).length
}

/** Counts the workers that have a job, including draining workers. */
export function busyCount(workers: readonly WorkerSeen[]): number {
  return workers.filter(
    (worker) => conditionOf(worker) === "busy" || (worker.state === "draining" && worker.jobs.length > 0),
  ).length
}

export interface WorkerEvent {
  worker_id: string
  fleet: string
  state: string
  current_load: number
  max_concurrency: number
  models_loaded: string[]
  silent_since: string | null
}

export interface WorkersEvent {
  workers: readonly WorkerEvent[]
  gone: readonly string[]
}

/** Merges the changes from worker events. A worker that isn't known yet must be read, because an
 * event doesn't contain all its fields. */
export function withWorkers(
  seen: readonly WorkerSeen[],
  { workers, gone }: WorkersEvent,
): { workers: readonly WorkerSeen[]; isUnknown: boolean } {
  const news = new Map(workers.map((worker) => [worker.worker_id, worker]))
  const goneIds = new Set(gone)
  const knownIds = new Set(seen.map((worker) => worker.worker_id))
  const remaining = seen.filter((worker) => !goneIds.has(worker.worker_id))
  return {
    workers: remaining.map((worker) => {
      const now = news.get(worker.worker_id)
      return now ? { ...worker, ...now } : worker
    }),
    isUnknown: workers.some((worker) => !knownIds.has(worker.worker_id)),
  }
}

export type JobNews = JobEvent & { dispatch_id: number; node: string | null }

/** Updates the workers' jobs from job events. */
export function withJobs(seen: readonly WorkerSeen[], jobs: readonly JobNews[]): readonly WorkerSeen[] {
  const news = new Map(jobs.map((job) => [job.id, job]))
  let isChanged = false
  const next = seen.map((worker) => {
    const stays = worker.jobs.filter((job) => isStillOn(news.get(job.job_id), worker.worker_id))
    const held = stays.map((job) => withNews(job, news.get(job.job_id)))
    const own = new Set(held.map((job) => job.job_id))
    const started = jobs.filter((job) => job.worker_id === worker.worker_id && job.status === "leased")
    const fresh = started.filter((job) => !own.has(job.id)).map(jobOf)
    const isSame =
      fresh.length === 0 &&
      held.length === worker.jobs.length &&
      held.every((job, at) => job === worker.jobs[at])
    if (isSame) return worker
    isChanged = true
    return { ...worker, jobs: [...held, ...fresh] }
  })
  return isChanged ? next : seen
}

function isStillOn(news: JobNews | undefined, worker: string): boolean {
  return !news || (news.status === "leased" && news.worker_id === worker)
}

function withNews(job: WorkerJob, news: JobNews | undefined): WorkerJob {
  if (!news || (news.percent === job.percent && news.node === job.node && news.started_at === job.started_at))
    return job
  return { ...job, percent: news.percent, node: news.node, started_at: news.started_at }
}

function jobOf(news: JobNews): WorkerJob {
  const { id, dispatch_id, tenant_id, workflow, attempt, started_at, percent, node } = news
  return { job_id: id, dispatch_id, tenant_id, workflow, attempt, started_at, percent, node }
}

/** Returns everything that a worker lacks for one workflow. */
export function missingFor(worker: MatrixWorker, workflow: string): string[] {
  return Object.values(worker.missing[workflow] ?? {}).flat()
}

export interface Ability {
  readonly workflow: string
  readonly able: number
  readonly online: number
  /** The number of draining workers, which finish their jobs and take no new ones. */
  readonly draining: number
  /** An item that all of the workers lack. */
  readonly everywhere: string | null
  /** The first worker that lacks something. */
  readonly first: { worker: string; what: string; more: number } | null
  readonly unknown: number
}

/** Counts, for each workflow, how many of a fleet's online workers can run it. */
export function abilitiesOf(matrix: Matrix, fleet: string, workflows: readonly string[]): Ability[] {
  const all = matrix.workers.filter((worker) => worker.fleet === fleet)
  const mine = all.filter((worker) => worker.state === "online")
  const draining = all.filter((worker) => worker.state === "draining").length
  return workflows.map((workflow) => {
    const lacking = mine.filter((worker) => missingFor(worker, workflow).length > 0)
    const [first] = lacking
    const common =
      first &&
      missingFor(first, workflow).find((what) => mine.every((worker) => isMissing(worker, workflow, what)))
    return {
      workflow,
      able: mine.filter((worker) => worker.can_run.includes(workflow)).length,
      online: mine.length,
      draining,
      everywhere: common ?? null,
      first: first
        ? { worker: first.worker_id, what: missingFor(first, workflow)[0] ?? "", more: lacking.length - 1 }
        : null,
      unknown: mine.filter((worker) => worker.unknown.includes(workflow)).length,
    }
  })
}

function isMissing(worker: MatrixWorker, workflow: string, what: string): boolean {
  return missingFor(worker, workflow).includes(what)
}

export interface Gap {
  readonly workflow: string
  /** The kind of the missing items: node_types, models or capabilities. */
  readonly kind: string
  readonly what: string
  readonly workers: readonly string[]
  readonly isEverywhere: boolean
}

/** Returns the missing items with the workers that lack them. Items that block the most workers
 * come first. */
export function gapsOf(matrix: Matrix): Gap[] {
  const gaps = new Map<string, { workflow: string; kind: string; what: string; workers: string[] }>()
  for (const worker of matrix.workers) {
    if (worker.state === "revoked") continue
    for (const [workflow, lack] of Object.entries(worker.missing))
      for (const [kind, things] of Object.entries(lack))
        for (const what of things) {
          const key = JSON.stringify([workflow, kind, what])
          const gap = gaps.get(key) ?? { workflow, kind, what, workers: [] }
          gap.workers.push(worker.worker_id)
          gaps.set(key, gap)
        }
  }
  const able = new Map(matrix.workflows.map((workflow) => [workflow.workflow, workflow.able]))
  return [...gaps.values()]
    .map((gap) => ({ ...gap, isEverywhere: able.get(gap.workflow) === 0 }))
    .sort(
      (a, b) =>
        Number(b.isEverywhere) - Number(a.isEverywhere) ||
        b.workers.length - a.workers.length ||
        names.compare(a.workflow, b.workflow),
    )
}

export type Cell = "can" | "cannot" | "unknown" | "not"

export function cellOf(worker: MatrixWorker, workflow: string): Cell {
  if (worker.can_run.includes(workflow)) return "can"
  if (workflow in worker.missing) return "cannot"
  return worker.unknown.includes(workflow) ? "unknown" : "not"
}

/** Shortens a model's path to its file name without the extension. */
export function modelName(path: string): string {
  const file = path.split(/[\\/]/).at(-1) ?? path
  return file.replace(/\.(safetensors|ckpt|pth|pt|bin|gguf|sft)$/i, "")
}

/** Shortens a GPU's name to the usual one, such as RTX 4090. */
export function gpuName(name: string): string {
  return name.replace(/^NVIDIA (GeForce )?/i, "")
}

export const GIGABYTE = 1024 ** 3
const short = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 })

/** Formats GPU memory in the manufacturers' units: 24 GB means 24 × 1024³ bytes. */
export function gigabytes(size: number): string {
  return short.format(size / GIGABYTE)
}
