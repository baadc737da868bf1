/** Computes the state of each node in a run from the API's answer and the events after it. Pure
 * functions. */

import type { ExecutionSeen, GraphRunAnswer, NodeSeen, ProgressSeen, QuestionSeen } from "@/api/schema"
import { outerOf } from "../canvas/document"
import { type NodeRun, PICTURES_SHOWN_MAX } from "../canvas/facts"
import { decidedOf } from "./decided"

/** An event of a run. */
export interface RunEvent extends ProgressSeen {
  readonly run_id: string
  readonly status: GraphRunAnswer["status"]
  readonly nodes: readonly NodeSeen[]
  readonly questions: readonly QuestionSeen[]
  readonly error: string | null
}

export interface MadeFile {
  readonly file_id: string
  readonly filename: string
  readonly mime_type: string
  readonly url: string
  readonly small_url?: string | undefined
}

const FINAL_STATUSES: ReadonlySet<string> = new Set(["completed", "failed", "cancelled"])

export function isOver(status: string): boolean {
  return FINAL_STATUSES.has(status)
}

/** Applies an event to the run. */
export function withEvent(run: GraphRunAnswer, event: RunEvent): GraphRunAnswer {
  return {
    ...run,
    status: event.status,
    nodes: [...event.nodes],
    questions: [...event.questions],
    progress: {
      overall_percent: event.overall_percent,
      weighted_percent: event.weighted_percent,
      completed_nodes: event.completed_nodes,
      total_nodes: event.total_nodes,
      running_nodes: event.running_nodes,
    },
  }
}

/** Returns a text that changes whenever an execution has changed, which means that its results must
 * be requested. */
export function stampOf(run: Pick<GraphRunAnswer, "status" | "nodes" | "questions">): string {
  const nodes = run.nodes.map((node) => [node.done, node.failed, node.skipped, node.cancelled].join("/"))
  return [run.status, run.questions.length, ...nodes].join(" ")
}

/** A preview picture of a running node. */
export interface PreviewEvent {
  readonly node_id: string
  readonly preview: string
}

export type Previews = ReadonlyMap<string, string>
const NO_PREVIEWS: Previews = new Map()

export function nodeRuns(
  run: GraphRunAnswer,
  urlOf: (file: MadeFile) => string,
  previews: Previews = NO_PREVIEWS,
): Map<string, NodeRun> {
  const asking = new Set(run.questions.map((question) => question.node))
  const executionsOf = grouped(run.executions, (execution) => execution.node)
  const goingOf = grouped(run.progress.running_nodes, (node) => node.node_id)
  const runs = new Map<string, NodeRun>()
  for (const node of run.nodes) {
    const executions = executionsOf.get(node.id) ?? []
    const going = goingOf.get(node.id) ?? []
    const decided = decidedOf(node, executions)
    const failed = executions.find((execution) => execution.status === "failed")
    runs.set(node.id, {
      status: asking.has(node.id) ? "asking" : node.status,
      progress: progressOf(node, going),
      step: going[0]?.current_step ?? null,
      backend: going[0]?.backend_id ?? executions.find((execution) => execution.backend)?.backend ?? null,
      done: node.done,
      expected: node.expected,
      seconds: secondsOf(node, executions),
      pictures: shownNow(node, picturesOf(executions).map(urlOf), previews),
      decision: node.status === "done" ? decided.decision : null,
      way: decided.way,
      error: node.status === "failed" ? (failed?.error ?? null) : null,
    })
  }
  return withInsides(runs)
}

/** Returns the pictures to show: the finished ones, and a running node's preview. */
function shownNow(node: NodeSeen, finished: readonly string[], previews: Previews): readonly string[] {
  const preview = node.status === "running" ? previews.get(node.id) : undefined
  return preview ? [...finished.slice(0, PICTURES_SHOWN_MAX - 1), preview] : finished
}

/** Returns the pictures that a question is about, in the order of the choices.
 * Undefined stands for a picture that can't be shown. */
export function picturesToPick(run: GraphRunAnswer, question: QuestionSeen): (string | undefined)[] {
  const execution = run.executions.find(
    (other) => other.node === question.node && other.index.join() === question.index.join(),
  )
  const input = execution?.inputs?.input as { images?: unknown } | unknown[] | undefined
  if (question.pick_from === null)
    return filesIn(input)
      .filter(isPicture)
      .map(({ url }) => url)
  const items = Array.isArray(input) ? input : Array.isArray(input?.images) ? input.images : []
  return (items as unknown[]).map((item) => filesIn(item)[0]?.url)
}

/** Marks a map or a loop as running while one of its inner nodes is running. */
function withInsides(runs: Map<string, NodeRun>): Map<string, NodeRun> {
  for (const [id, inner] of runs) {
    const outer = runs.get(outerOf(id))
    if (!id.includes("/") || !outer || outer.status !== "pending") continue
    if (inner.status === "pending" || inner.status === "skipped") continue
    const { step, backend, pictures, progress } = inner
    const status = inner.status === "asking" ? "asking" : "running"
    runs.set(outerOf(id), { ...outer, status, step, backend, pictures, progress })
  }
  return runs
}

function grouped<T>(all: readonly T[], keyOf: (item: T) => string): Map<string, T[]> {
  const groups = new Map<string, T[]>()
  for (const item of all) {
    const group = groups.get(keyOf(item))
    if (group) group.push(item)
    else groups.set(keyOf(item), [item])
  }
  return groups
}

function progressOf(node: NodeSeen, going: ProgressSeen["running_nodes"]): number | null {
  if (node.status !== "running") return null
  const ended = node.done + node.skipped + node.failed + node.cancelled
  const part = going.reduce((sum, running) => sum + running.progress, ended)
  return Math.min(1, part / Math.max(1, node.expected))
}

function secondsOf(node: NodeSeen, executions: readonly ExecutionSeen[]): number | null {
  const [only] = executions
  if (node.type !== "workflow" || executions.length !== 1 || !only?.started_at || !only.ended_at) return null
  return tookSeconds(only.started_at, only.ended_at)
}

export function tookSeconds(from: string, to: string): number {
  return Math.max(0, (Date.parse(to) - Date.parse(from)) / 1000)
}

function picturesOf(executions: readonly ExecutionSeen[]): MadeFile[] {
  const pictures: MadeFile[] = []
  for (const execution of executions) {
    pictures.push(...shownFiles(execution).filter(isPicture))
    if (pictures.length >= PICTURES_SHOWN_MAX) break
  }
  return pictures.slice(0, PICTURES_SHOWN_MAX)
}

function isPicture(file: MadeFile): boolean {
  return file.mime_type.startsWith("image/")
}

/** Returns the files to show: the pictures that a judge keeps, the files that a question is about,
 * or otherwise all output files. */
function shownFiles(execution: ExecutionSeen): MadeFile[] {
  if (execution.status === "asking") return filesIn(execution.inputs)
  const { output } = (execution.outputs ?? {}) as { output?: { scored?: unknown; images?: unknown } }
  return output?.scored ? filesIn(output.images) : filesOf(execution)
}

const filesByExecution = new WeakMap<ExecutionSeen, MadeFile[]>()

/** Returns the files that an execution has produced. The result is cached per execution. */
export function filesOf(execution: ExecutionSeen): MadeFile[] {
  const cached = filesByExecution.get(execution)
  if (cached) return cached
  const files = filesIn(execution.outputs)
  filesByExecution.set(execution, files)
  return files
}

/** Returns all displayable files in a value, without duplicates. */
export function filesIn(value: unknown): MadeFile[] {
  const files = new Map<string, MadeFile>()
  collect(value, files)
  return [...files.values()]
}

function collect(value: unknown, files: Map<string, MadeFile>): void {
  if (typeof value !== "object" || value === null) return
  const file = value as Partial<MadeFile>
  if (typeof file.file_id === "string" && typeof file.url === "string" && !files.has(file.file_id))
    files.set(file.file_id, {
      file_id: file.file_id,
      filename: file.filename ?? file.file_id,
      mime_type: file.mime_type ?? "",
      url: file.url,
      small_url: file.small_url,
    })
  for (const part of Object.values(value)) collect(part, files)
}

const URL_MS_MAX = 10 * 60_000

/** Keeps picture URLs stable, preferring thumbnails. Each answer signs new URLs, but a picture
 * on the page keeps its URL while it is valid, so that it isn't downloaded again. */
export class SteadyUrls {
  private readonly known = new Map<string, { url: string; until: number }>()

  of = (file: MadeFile): string => {
    const stored = this.known.get(file.file_id)
    if (stored && stored.until > Date.now()) return stored.url
    const url = file.small_url ?? file.url
    this.known.set(file.file_id, { url, until: Date.now() + URL_MS_MAX })
    return url
  }
}

/** Returns a backend's name without its prefix. */
export function backendName(backend: string): string {
  return backend.replace(/^(worker|fleet):/, "")
}
