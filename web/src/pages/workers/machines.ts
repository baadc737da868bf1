/** Groups, orders and updates the workers for the pages about machines, and works out which
 * worker can run which workflow. */

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

type Told = Pick<WorkerSeen, "state" | "current_load" | "jobs" | "silent_since">

export function conditionOf(worker: Told): Condition {
  if (worker.state !== "online") return CONDITIONS.find((each) => each === worker.state) ?? "offline"
  // A silent worker may be offline, so its last report of idle or busy no longer counts.
  if (worker.silent_since) return "silent"
  return worker.current_load > 0 || worker.jobs.length > 0 ? "busy" : "idle"
}

/** Returns the job that the worker is running. A worker may also hold its next job, which hasn't
 * started. */
export function jobAtHand(worker: Pick<WorkerSeen, "jobs">): WorkerJob | undefined {
  return worker.jobs.find((each) => each.started_at !== null) ?? worker.jobs[0]
}

const names = new Intl.Collator(undefined, { numeric: true })

/** Sorts workers: pending ones first and revoked ones last, otherwise by name, so that no row
 * moves when a job starts or ends. */
export function inOrder(workers: readonly WorkerSeen[]): WorkerSeen[] {
  const rank = (each: WorkerSeen) => (each.state === "pending" ? 0 : each.state === "revoked" ? 2 : 1)
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
export function loopbackIn(command: string): string | null {
  const address = /--control '?([^\s']+)/.exec(command)?.[1]
  return address && URL.canParse(address) && LOOPBACK.test(new URL(address).hostname) ? address : null
}

/** Returns the address at which this page was opened if other machines can reach it, otherwise
 * an example. */
export function betterThan(address: string, here: string = window.location.origin): string {
  if (!LOOPBACK.test(new URL(here).hostname)) return here
  const { protocol, port } = new URL(address)
  return `${protocol}//192.168.1.20${port && `:${port}`}`
}

/** Groups workers by fleet, including fleets without workers. */
export function byFleet(workers: readonly WorkerSeen[], fleets: readonly FleetAnswer[]): FleetGroup[] {
  const known = new Map(fleets.map((each) => [fleetName(each), each]))
  const all = new Set([...known.keys(), ...workers.map((each) => each.fleet)])
  return [...all].sort(names.compare).map((name) => ({
    name,
    fleet: known.get(name) ?? null,
    workers: inOrder(workers.filter((each) => each.fleet === name)),
  }))
}

export function countOf(workers: readonly WorkerSeen[], ...conditions: readonly Condition[]): number {
  return workers.filter((each) => conditions.includes(conditionOf(each))).length
}

/** Counts the workers that have a job, including draining workers. */
export function busyOf(workers: readonly WorkerSeen[]): number {
  return workers.filter(
    (each) => conditionOf(each) === "busy" || (each.state === "draining" && each.jobs.length > 0),
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
  const news = new Map(workers.map((each) => [each.worker_id, each]))
  const left = new Set(gone)
  const known = new Set(seen.map((each) => each.worker_id))
  const kept = seen.filter((each) => !left.has(each.worker_id))
  return {
    workers: kept.map((each) => {
      const now = news.get(each.worker_id)
      return now ? { ...each, ...now } : each
    }),
    isUnknown: workers.some((each) => !known.has(each.worker_id)),
  }
}

export type JobNews = JobEvent & { dispatch_id: number; node: string | null }

/** Updates the workers' jobs from job events. */
export function withJobs(seen: readonly WorkerSeen[], jobs: readonly JobNews[]): readonly WorkerSeen[] {
  const news = new Map(jobs.map((each) => [each.id, each]))
  let isChanged = false
  const next = seen.map((worker) => {
    const stays = worker.jobs.filter((each) => isStill(news.get(each.job_id), worker.worker_id))
    const held = stays.map((each) => withNews(each, news.get(each.job_id)))
    const own = new Set(held.map((each) => each.job_id))
    const begun = jobs.filter((each) => each.worker_id === worker.worker_id && each.status === "leased")
    const fresh = begun.filter((each) => !own.has(each.id)).map(jobOf)
    const isSame =
      fresh.length === 0 &&
      held.length === worker.jobs.length &&
      held.every((each, at) => each === worker.jobs[at])
    if (isSame) return worker
    isChanged = true
    return { ...worker, jobs: [...held, ...fresh] }
  })
  return isChanged ? next : seen
}

function isStill(news: JobNews | undefined, worker: string): boolean {
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
export function lackOf(worker: MatrixWorker, workflow: string): string[] {
  return Object.values(worker.missing[workflow] ?? {}).flat()
}

export interface Ability {
  readonly workflow: string
  readonly able: number
  readonly online: number
  /** The number of draining workers: they finish their jobs and take no new ones. */
  readonly draining: number
  /** An item that none of the workers has. */
  readonly everywhere: string | null
  /** The first worker that lacks something. */
  readonly first: { worker: string; what: string; more: number } | null
  readonly notTold: number
}

/** Counts, for each workflow, how many of a fleet's online workers can run it. */
export function abilitiesOf(matrix: Matrix, fleet: string, workflows: readonly string[]): Ability[] {
  const all = matrix.workers.filter((each) => each.fleet === fleet)
  const mine = all.filter((each) => each.state === "online")
  const draining = all.filter((each) => each.state === "draining").length
  return workflows.map((workflow) => {
    const lacking = mine.filter((each) => lackOf(each, workflow).length > 0)
    const [first] = lacking
    const common =
      first && lackOf(first, workflow).find((what) => mine.every((each) => doesLack(each, workflow, what)))
    return {
      workflow,
      able: mine.filter((each) => each.can_run.includes(workflow)).length,
      online: mine.length,
      draining,
      everywhere: common ?? null,
      first: first
        ? { worker: first.worker_id, what: lackOf(first, workflow)[0] ?? "", more: lacking.length - 1 }
        : null,
      notTold: mine.filter((each) => each.unknown.includes(workflow)).length,
    }
  })
}

function doesLack(worker: MatrixWorker, workflow: string, what: string): boolean {
  return lackOf(worker, workflow).includes(what)
}

export interface Gap {
  readonly workflow: string
  /** One of node_types, models or capabilities. */
  readonly kind: string
  readonly what: string
  readonly workers: readonly string[]
  readonly isEverywhere: boolean
}

/** Returns what is missing and where, with the items that stop the most workers first. */
export function gapsOf(matrix: Matrix): Gap[] {
  const found = new Map<string, { workflow: string; kind: string; what: string; workers: string[] }>()
  for (const worker of matrix.workers) {
    if (worker.state === "revoked") continue
    for (const [workflow, lack] of Object.entries(worker.missing))
      for (const [kind, things] of Object.entries(lack))
        for (const what of things) {
          const key = JSON.stringify([workflow, kind, what])
          const gap = found.get(key) ?? { workflow, kind, what, workers: [] }
          gap.workers.push(worker.worker_id)
          found.set(key, gap)
        }
  }
  const able = new Map(matrix.workflows.map((each) => [each.workflow, each.able]))
  return [...found.values()]
    .map((each) => ({ ...each, isEverywhere: able.get(each.workflow) === 0 }))
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

/** Formats GPU memory as manufacturers do: 24 GB means 24 × 1024³ bytes. */
export function gigabytes(size: number): string {
  return short.format(size / GIGABYTE)
}
