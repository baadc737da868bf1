/** Determines a node's content and size on the canvas. canvas.css uses the same sizes. Pure
 * functions. */

import { type NodeHandle, Position } from "@xyflow/react"
import type { ProblemSeen } from "@/api/schema"
import { duration } from "@/ui"
import { words } from "@/words/en/canvas"
import type { GraphNode } from "./document"
import { bodyOf, valueAt } from "./names"
import { MEDIA, type NodePorts, type Port } from "./types"

/** A node's state in a run. */
export interface NodeRun {
  readonly status: string
  /** The progress from 0 to 1, or null if it is unknown. */
  readonly progress: number | null
  readonly step: string | null
  readonly backend: string | null
  readonly done: number
  readonly expected: number
  readonly seconds: number | null
  /** The first few pictures that the node has produced. */
  readonly pictures: readonly string[]
  /** The decision of a deciding node, in words. */
  readonly decision: string | null
  /** The output port that a deciding node used to pass the value on. */
  readonly way: string | null
  readonly error: string | null
}

/** The maximum number of pictures shown on a node. */
export const PICTURES_SHOWN_MAX = 4

export interface NodeFacts extends Record<string, unknown> {
  readonly node: GraphNode
  /** The name of the effect, workflow or graph that the node runs, or null if it equals the node's
   * id. */
  readonly uses: string | null
  readonly ports: NodePorts
  readonly wired: readonly string[]
  readonly problems: readonly ProblemSeen[]
  readonly warnings: readonly ProblemSeen[]
  /** An example of the node's output. */
  readonly example: string | null
  readonly isOffered: boolean
  readonly run: NodeRun | null
}

/** Returns the port of the outer node where a problem with an inner node is shown. */
export function portOf({ node, port }: ProblemSeen): string {
  const slash = node.indexOf("/")
  const inner = slash < 0 ? "" : node.slice(slash + 1)
  if (inner === "" || inner === "do") return port
  if (inner === ".start") return `start.${port}`
  if (inner.startsWith(".") && port === "value") return inner.slice(1)
  return inner.startsWith(".") ? port : "do"
}

const EMPTY = /^(workflow|effect|graph) must be .* characters, not ''$/

/** Shortens a problem's message for display beside its field. The field's name is removed. If
 * nothing has been selected yet, the message becomes a short request to select something. */
export function withShortMessage(problem: ProblemSeen): ProblemSeen {
  const { message, port } = problem
  if (EMPTY.test(message)) return { ...problem, message: words.nothingChosen }
  if (port === "" || !message.startsWith(`${port} `)) return problem
  return { ...problem, message: message.slice(port.length + 1) }
}

const PORTS_MAX = 8

/** Returns the inputs to show: all of them if the node is selected or has few, otherwise those that
 * are required, set, connected, invalid or files. */
export function shownInputs(
  { ports, node, wired, problems }: NodeFacts,
  isSelected: boolean,
): readonly Port[] {
  if (isSelected || ports.inputs.length <= PORTS_MAX) return ports.inputs
  return ports.inputs.filter(
    ({ name, isRequired, type }) =>
      isRequired ||
      valueAt(node, name) !== undefined ||
      MEDIA.has(type.name) ||
      wired.includes(name) ||
      problems.some((problem) => problem.port === name),
  )
}

/** Returns the name of the effect, workflow or graph that a node runs, or null if it equals the
 * node's id. */
export function usesOf(node: GraphNode): string | null {
  const named = node.type === "map" || node.type === "loop" ? bodyOf(node) : node
  const name = named.effect ?? named.workflow ?? named.graph
  return typeof name === "string" && name !== "" && name !== node.id ? name : null
}

export function hasPicture(node: GraphNode): boolean {
  if (node.type === "input") return MEDIA.has(String(node.value_type ?? "").replace("[]", ""))
  return ["workflow", "output", "map", "loop", "graph", "score", "approve"].includes(node.type)
}

/** Returns the labels at the left and right of the node's footer, or null if it has no footer. */
export function footOf(data: NodeFacts): readonly [string, string] | null {
  const texts = data.run ? footOfRun(data.run) : footOfNode(data)
  return texts[0] || texts[1] || data.node.type === "workflow" ? texts : null
}

function footOfRun(run: NodeRun): [string, string] {
  const many = run.expected > 1 ? words.of(run.done, run.expected) : ""
  const right = run.backend?.replace(/^(worker|fleet):/, "") ?? ""
  if (run.error) return [run.error, right]
  if (run.decision) return [run.decision, right || many]
  if (run.status === "running" && run.step) return [run.step, right || many]
  if (run.status === "done" && run.seconds !== null) return [duration(run.seconds), right || many]
  return [words.nodeStatuses[run.status] ?? run.status, right || many]
}

function footOfNode({ node, problems, isOffered }: NodeFacts): [string, string] {
  const first = problems[0]
  if (first) return [first.port ? `${first.port}: ${first.message}` : first.message, ""]
  if (node.type === "condition") return [String(node.condition ?? ""), ""]
  if (node.type === "merge") return [node.over ? `${words.over} ${String(node.over)}` : "", ""]
  if (node.type === "fanout") return [footOfFanOut(node), ""]
  if (node.type === "loop")
    return [`${words.untilShort} ${String(node.until ?? "")}`, `≤ ${String(node.at_most)}`]
  if (node.type === "approve") return [String(node.message ?? ""), ""]
  if (node.type === "switch") return [words.ways(Array.isArray(node.cases) ? node.cases.length : 0), ""]
  if (node.type === "graph") return [words.graphInside, `v${String(node.version ?? "")}`]
  if (node.type === "map") return [words.eachItem, node.at_once ? words.together(Number(node.at_once)) : ""]
  if (node.type === "score")
    return [String(node.measure ?? words.judged), node.keep ? words.keepShort(Number(node.keep)) : ""]
  if (node.type !== "workflow") return ["", ""]
  if (!isOffered) return [words.unknownOffer, ""]
  const affinity = node.backend_affinity ? String(node.backend_affinity) : ""
  const falls = { ask_user: words.asks, auto_select: words.moves }[String(node.fallback_strategy)] ?? ""
  return [affinity.replace(/^(worker|fleet):/, "") || words.anyWorker, falls]
}

function footOfFanOut(node: GraphNode): string {
  if (node.mode !== "distribute") return words.copies(Number(node.output_count ?? 2))
  return node.per_item ? words.eachItem : words.parts(Number(node.output_count ?? 2))
}

const WIDE: ReadonlySet<string> = new Set(["workflow", "merge", "value", "map", "loop", "graph", "score"])
const BORDER = 1
const HEAD = 36
const PICTURE = 96
const PORTS = { padding: 8, each: 22, rest: 20 }
const FOOT = 31
const HANDLE = 12

export interface Drawn {
  readonly width: number
  readonly height: number
  readonly handles: NodeHandle[]
}

/** Calculates a node's size before it is drawn, so that its connections can be drawn immediately,
 * without measuring. */
export function drawnSize(data: NodeFacts, isSelected: boolean): Drawn {
  const { node, ports } = data
  const width = WIDE.has(node.type) ? 232 : 200
  const inputs = shownInputs(data, isSelected)
  const top = BORDER + HEAD + (hasPicture(node) ? PICTURE : 0) + PORTS.padding
  const rest = inputs.length < ports.inputs.length ? PORTS.rest : 0
  const rows = Math.max(inputs.length * PORTS.each + rest, ports.outputs.length * PORTS.each)
  const handle = (type: "source" | "target", { name }: Port, at: number): NodeHandle => ({
    id: name,
    type,
    position: type === "target" ? Position.Left : Position.Right,
    x: (type === "target" ? BORDER : width - BORDER) - HANDLE / 2,
    y: top + at * PORTS.each + (PORTS.each - HANDLE) / 2,
    width: HANDLE,
    height: HANDLE,
  })
  return {
    width,
    height: top + rows + PORTS.padding + (footOf(data) ? FOOT : 0) + BORDER,
    handles: [
      ...inputs.map((port, at) => handle("target", port, at)),
      ...ports.outputs.map((port, at) => handle("source", port, at)),
    ],
  }
}
