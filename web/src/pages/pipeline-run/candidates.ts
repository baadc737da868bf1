/** Keeps a run's candidates for the page: their labels, order and lineage, and the changes that
 * events report. */

import type { CandidateAnswer, CandidateStatus, JudgedBy, StepAnswer } from "@/api/schema"

export interface Candidate extends CandidateAnswer {
  /** When the URL was received, as a performance.now() value. */
  urlAt: number
}

export interface Candidates {
  /** All candidates, oldest first. */
  all: readonly Candidate[]
  /** The cursor for the next page, if the run has more candidates than have been read. */
  next: string | null
}

/** URLs are valid for 15 minutes. A picture on the page keeps its URL, because a new one would
 * download it again. */
const URL_MS_MAX = 600_000

export function withStableUrls(
  before: readonly Candidate[],
  fresh: readonly CandidateAnswer[],
  now: number,
): Candidate[] {
  const old = new Map(before.map((candidate) => [candidate.id, candidate]))
  return fresh.map((candidate) => {
    const shown = old.get(candidate.id)
    const isGood = shown?.url && candidate.url && now - shown.urlAt < URL_MS_MAX
    return isGood ? { ...candidate, url: shown.url, urlAt: shown.urlAt } : { ...candidate, urlAt: now }
  })
}

/** Appends new candidates, and replaces known ones that were read again. */
export function added(before: Candidates, fresh: readonly CandidateAnswer[], now: number): Candidates {
  const read = withStableUrls(before.all, fresh, now)
  const byId = new Map(read.map((candidate) => [candidate.id, candidate]))
  const stay = before.all.map((candidate) => byId.get(candidate.id) ?? candidate)
  const ids = new Set(before.all.map((candidate) => candidate.id))
  return { ...before, all: [...stay, ...read.filter((candidate) => !ids.has(candidate.id))] }
}

export interface CandidateEvent {
  candidate_id?: string
  candidates?: readonly string[]
  after?: CandidateStatus
  judged_by?: JudgedBy | null
  scores?: Record<string, number>
  /** Set only in events about a judge's score. */
  score?: number
  is_judge?: boolean
  error?: string | null
}

const VERDICTS: Record<string, CandidateStatus> = {
  approved: "approved",
  rejected: "rejected",
  crowned: "winner",
}

/** Applies an event to the known candidates. */
export function withEvent(before: Candidates, event: string, data: CandidateEvent): Candidates {
  const change = changeOf(event, data)
  if (change && data.candidate_id)
    return {
      ...before,
      all: before.all.map((candidate) =>
        candidate.id === data.candidate_id ? { ...candidate, ...change } : candidate,
      ),
    }
  const scores = event === "voted" ? data.scores : undefined
  if (!scores) return before
  return {
    ...before,
    all: before.all.map((candidate) => ({ ...candidate, score: scores[candidate.id] ?? candidate.score })),
  }
}

function changeOf(event: string, data: CandidateEvent): Partial<Candidate> | null {
  if (event === "scored") return { judge_score: data.score ?? null, judge_error: null }
  if (event === "job_failed") return data.is_judge ? { judge_error: data.error ?? "" } : null
  const status = event === "undone" ? data.after : VERDICTS[event]
  return status ? { status, judged_by: data.judged_by ?? null } : null
}

/** Labels candidates for display: 2·07 is the seventh candidate of the second step. */
export function labelsOf(all: readonly Candidate[]): ReadonlyMap<string, string> {
  const counts = new Map<number, number>()
  return new Map(
    all.map((candidate) => {
      const number = (counts.get(candidate.step) ?? 0) + 1
      counts.set(candidate.step, number)
      return [candidate.id, `${candidate.step + 1}·${String(number).padStart(2, "0")}`]
    }),
  )
}

/** Returns the candidate and its ancestors, from the candidate itself to the base. */
export function lineageOf(id: string | null, byId: ReadonlyMap<string, Candidate>): Candidate[] {
  const lineage: Candidate[] = []
  let next = id === null ? undefined : byId.get(id)
  while (next && !lineage.includes(next)) {
    lineage.push(next)
    next = next.parent === null ? undefined : byId.get(next.parent)
  }
  return lineage
}

/** Returns the ids of rejected candidates and all their descendants. */
export function stoppedIds(all: readonly Candidate[]): ReadonlySet<string> {
  const stopped = new Set<string>()
  const byStep = [...all].sort((one, other) => one.step - other.step)
  for (const candidate of byStep)
    if (candidate.status === "rejected" || (candidate.parent !== null && stopped.has(candidate.parent)))
      stopped.add(candidate.id)
  return stopped
}

/** Checks whether the step's judge has yet to score the candidate. */
export function isUnjudged(candidate: Candidate, steps: readonly StepAnswer[]): boolean {
  const { status, judge_score, judge_error } = candidate
  return (
    steps[candidate.step]?.judge != null &&
    status === "active" &&
    judge_score === null &&
    judge_error === null
  )
}

/** Returns the ids of the candidates that get no children until a person judges them. */
export function waitingIds(all: readonly Candidate[], steps: readonly StepAnswer[]): ReadonlySet<string> {
  const stopped = stoppedIds(all)
  const waiting = all.filter(
    (candidate) =>
      steps[candidate.step]?.needs_approval &&
      candidate.status === "active" &&
      !stopped.has(candidate.id) &&
      !isUnjudged(candidate, steps),
  )
  return new Set(waiting.map((candidate) => candidate.id))
}

const RANKS: Record<CandidateStatus, number> = { winner: 0, approved: 1, active: 2, rejected: 3 }

/** Sorts candidates as the run does when it chooses parents: by status (winners, approved,
 * others), then by score, then oldest first. */
export function bestFirst(all: readonly Candidate[]): Candidate[] {
  return [...all].sort(
    (one, other) =>
      RANKS[one.status] - RANKS[other.status] ||
      other.score - one.score ||
      (other.judge_score ?? -Number.MAX_VALUE) - (one.judge_score ?? -Number.MAX_VALUE) ||
      one.created_at.localeCompare(other.created_at) ||
      one.id.localeCompare(other.id),
  )
}

/** Sorts candidates by the judge's score. Those without a score come last, in order of creation. */
export function highestFirst(all: readonly Candidate[]): Candidate[] {
  const score = (candidate: Candidate) => candidate.judge_score ?? Number.NEGATIVE_INFINITY
  return [...all].sort((one, other) => (score(one) === score(other) ? 0 : score(other) - score(one)))
}

export type Show = "all" | "judge" | "chosen" | "open" | "rejected"
export const SHOWS: readonly Show[] = ["all", "judge", "chosen", "open", "rejected"]

export function fits(candidate: Candidate, show: Show, waiting: ReadonlySet<string>): boolean {
  if (show === "all") return true
  if (show === "judge") return waiting.has(candidate.id)
  if (show === "open") return candidate.status === "active"
  if (show === "rejected") return candidate.status === "rejected"
  return candidate.status === "approved" || candidate.status === "winner"
}

export function isPicture({ content_type }: { content_type: string }): boolean {
  return content_type.startsWith("image/") && !content_type.startsWith("image/svg")
}

const PROMPTS = ["prompt", "text", "positive", "positive_prompt", "caption", "description"]

/** Returns the prompt: a property with one of the usual names, or else the longest text. */
export function promptOf(properties: Record<string, unknown>): string | null {
  for (const name of PROMPTS) {
    const value = properties[name]
    if (typeof value === "string" && value.trim()) return value
  }
  const texts = Object.values(properties).filter(
    (value): value is string => typeof value === "string" && value.includes(" "),
  )
  return texts.sort((one, other) => other.length - one.length)[0] ?? null
}

/** Returns the other properties as short texts. `aFile` is the text shown for a file. */
export function factsOf(properties: Record<string, unknown>, aFile: string): [string, string][] {
  const prompt = promptOf(properties)
  return Object.entries(properties)
    .filter(([, value]) => value !== null && value !== prompt)
    .map(([name, value]) => [name.replaceAll("_", " "), valueText(value, aFile)])
}

const ID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/

function valueText(value: unknown, aFile: string): string {
  if (typeof value === "string" && ID.test(value)) return aFile
  if (typeof value !== "object" || value === null) return String(value)
  return "file_id" in value || "file" in value || "job_id" in value ? aFile : JSON.stringify(value)
}
