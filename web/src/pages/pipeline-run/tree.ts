/** Calculates the position of each candidate in the tree: one column per step, with parents
 * centered beside their children. */

import { bestFirst, type Candidate, lineageOf } from "./candidates"

export const CELL = { width: 84, height: 105, row: 140, column: 196, top: 16, left: 210 }
/** If a step has more candidates than this, only the best are shown until the user asks for all. */
export const STEP_MAX = 40
export const BEST = 6

export interface Place {
  candidate: Candidate
  x: number
  y: number
}

/** The number of a step's hidden candidates, and where to show it. */
export interface Rest {
  step: number
  hidden: number
  x: number
  y: number
}

export interface Layout {
  places: readonly Place[]
  rests: readonly Rest[]
  /** The vertical center of the base candidates, where the lines begin. */
  start: number
  width: number
  height: number
}

/** Returns the ids of the candidates to show: all candidates of small steps, the best of large
 * steps, the candidate `always`, and the ancestors of all of them. */
export function shownIds(
  all: readonly Candidate[],
  whole: ReadonlySet<number>,
  always: string | null,
): ReadonlySet<string> {
  const byId = new Map(all.map((candidate) => [candidate.id, candidate]))
  const bySteps = new Map<number, Candidate[]>()
  for (const candidate of all)
    bySteps.set(candidate.step, [...(bySteps.get(candidate.step) ?? []), candidate])
  const shown = new Set<string>()
  const show = (id: string) => {
    for (const candidate of lineageOf(id, byId)) shown.add(candidate.id)
  }
  for (const [step, candidates] of bySteps) {
    const isWhole = candidates.length <= STEP_MAX || whole.has(step)
    for (const candidate of isWhole ? candidates : bestFirst(candidates).slice(0, BEST)) show(candidate.id)
  }
  if (always) show(always)
  return shown
}

export function layout(
  all: readonly Candidate[],
  steps: number,
  whole: ReadonlySet<number>,
  always: string | null,
): Layout {
  const shown = shownIds(all, whole, always)
  const children = new Map<string | null, Candidate[]>()
  for (const candidate of all)
    if (shown.has(candidate.id))
      children.set(candidate.parent, [...(children.get(candidate.parent) ?? []), candidate])
  const places: Place[] = []
  let next = CELL.top
  const put = (candidate: Candidate): number => {
    const own = (children.get(candidate.id) ?? []).map(put)
    const y = own.length > 0 ? ((own[0] ?? 0) + (own.at(-1) ?? 0)) / 2 : next
    if (own.length === 0) next += CELL.row
    places.push({ candidate, x: columnOf(candidate.step), y })
    return y
  }
  const bases = (children.get(null) ?? []).map(put)
  const rests = restsOf(all, shown, steps, next)
  return {
    places,
    rests,
    start: bases.length > 0 ? ((bases[0] ?? 0) + (bases.at(-1) ?? 0)) / 2 : CELL.top,
    width: columnOf(steps - 1) + CELL.width + 48,
    height: next + (rests.length > 0 ? 64 : 0),
  }
}

export function columnOf(step: number): number {
  return CELL.left + step * CELL.column
}

function restsOf(all: readonly Candidate[], shown: ReadonlySet<string>, steps: number, y: number): Rest[] {
  return Array.from({ length: steps }, (_, step) => ({
    step,
    hidden: all.filter((candidate) => candidate.step === step && !shown.has(candidate.id)).length,
    x: columnOf(step),
    y,
  })).filter((rest) => rest.hidden > 0)
}

/** Returns the id of the candidate that an arrow key leads to: the parent, the first child, or the
 * next one in the same column. */
export function neighborOf(places: readonly Place[], id: string, key: string): string | null {
  const here = places.find((place) => place.candidate.id === id)
  if (!here) return null
  if (key === "ArrowLeft") return here.candidate.parent
  if (key === "ArrowRight") return highest(places.filter((place) => place.candidate.parent === id))
  const column = places.filter((place) => place.x === here.x)
  if (key === "ArrowDown") return highest(column.filter((place) => place.y > here.y))
  if (key === "ArrowUp") return lowest(column.filter((place) => place.y < here.y))
  return null
}

function highest(places: readonly Place[]): string | null {
  return places.toSorted((one, other) => one.y - other.y)[0]?.candidate.id ?? null
}

function lowest(places: readonly Place[]): string | null {
  return places.toSorted((one, other) => other.y - one.y)[0]?.candidate.id ?? null
}

/** Returns the SVG path of a curve between two points. */
export function line(fromX: number, fromY: number, toX: number, toY: number): string {
  const half = (toX - fromX) / 2
  return `M${fromX} ${fromY}C${fromX + half} ${fromY} ${toX - half} ${toY} ${toX} ${toY}`
}
