/** Describes the decisions of deciding nodes in a few words for the node itself. Pure functions. */

import type { ExecutionSeen, NodeSeen } from "@/api/schema"
import { words } from "@/words/en/canvas"

export interface Decided {
  readonly decision: string | null
  /** The output port that the node used to pass the value on. */
  readonly way: string | null
}

const NOTHING: Decided = { decision: null, way: null }
const CHARACTERS_MAX = 60

export function decidedOf(node: Pick<NodeSeen, "type">, executions: readonly ExecutionSeen[]): Decided {
  const [only] = executions
  const outputs = only?.outputs
  if (executions.length !== 1 || !outputs) return NOTHING
  if (node.type === "switch" || node.type === "condition") return branchTaken(outputs)
  if (node.type === "approve") return decisionOnApproval(outputs, only.inputs ?? {})
  const text = describers[node.type]?.(outputs) ?? null
  return { decision: text, way: null }
}

type Values = Readonly<Record<string, unknown>>

const describers: Readonly<Record<string, (outputs: Values) => string | null>> = {
  loop: ({ rounds, score }) =>
    typeof rounds === "number"
      ? [words.rounds(rounds), typeof score === "number" && words.score(short(score))]
          .filter(Boolean)
          .join(", ")
      : null,
  map: ({ output }) => {
    const { count, failed } = recordOf(output)
    return typeof count === "number" ? words.itemsDone(count, Number(failed ?? 0)) : null
  },
  score: ({ output }) => {
    const { scored, best, score } = recordOf(output)
    if (!Array.isArray(scored)) return null
    const keptText = words.kept(Array.isArray(best) ? best.length : scored.length, scored.length)
    return typeof score === "number" ? `${keptText}, ${words.score(short(score))}` : keptText
  },
  value: (outputs) => {
    const values = Object.entries(outputs).filter(([, value]) => typeof value !== "object")
    return values.map(([name, value]) => `${name}: ${shortly(value)}`).join(", ") || null
  },
}

function branchTaken(outputs: Values): Decided {
  const [way] = Object.keys(outputs)
  return way === undefined ? NOTHING : { decision: words.went(way), way }
}

function decisionOnApproval(outputs: Values, inputs: Values): Decided {
  const [way] = Object.keys(outputs)
  if (way === undefined) return NOTHING
  const decision = way === "approved" ? words.approved : words.rejected
  const [some, all] = [itemsIn(outputs[way]), itemsIn(inputs.input)]
  const isPicked = some !== null && all !== null && some < all
  return { decision: isPicked ? `${decision}, ${words.of(some, all)}` : decision, way }
}

function itemsIn(value: unknown): number | null {
  if (Array.isArray(value)) return value.length
  const { images } = recordOf(value)
  return Array.isArray(images) ? images.length : null
}

function recordOf(value: unknown): Values {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Values) : {}
}

function short(value: number): string {
  return String(Number(value.toPrecision(3)))
}

function shortly(value: unknown): string {
  const text = String(value)
  return text.length > CHARACTERS_MAX ? `${text.slice(0, CHARACTERS_MAX)}…` : text
}
