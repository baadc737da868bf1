/** Calculates the bars of a timeline as fractions of its axis. Pure functions. */

import type { KindSeconds, NodeTimeline } from "@/api/schema"

export interface Bar {
  readonly kind: string
  /** The start of the bar as a fraction of the axis, from 0 to 1; `to` is its end. */
  readonly from: number
  readonly to: number
  readonly seconds: number
}

const AXIS_SECONDS_MIN = 0.001
const WAITS = ["asking", "queued", "held", "retried"] as const

export function barsOf(node: Pick<NodeTimeline, "spans">, seconds: number): Bar[] {
  const all = Math.max(AXIS_SECONDS_MIN, seconds)
  return node.spans.map(({ kind, start, end }) => ({
    kind,
    from: Math.min(1, start / all),
    to: Math.min(1, end / all),
    seconds: end - start,
  }))
}

const WAIT_SECONDS_MIN = 0.05

/** Returns the waiting times by kind, longest first, as averages per execution. */
export function waitsOf(seconds: KindSeconds, executions: number): { kind: string; seconds: number }[] {
  return WAITS.map((kind) => ({ kind, seconds: seconds[kind] / Math.max(1, executions) }))
    .filter((wait) => wait.seconds >= WAIT_SECONDS_MIN)
    .toSorted((one, two) => two.seconds - one.seconds)
}

/** Returns the kinds that occur in a timeline, for its legend. */
export function kindsIn(nodes: readonly Pick<NodeTimeline, "seconds">[]): string[] {
  const kinds = ["running", ...WAITS] as const
  return kinds.filter((kind) => nodes.some(({ seconds }) => seconds[kind] >= WAIT_SECONDS_MIN))
}
