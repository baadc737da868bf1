/** Converts attempts to bars on a time axis: waiting, preparing files and models, running. */

import type { AttemptLine, JobDetails } from "@/api/schema"

export interface Bar {
  readonly kind: "waited" | "prepared" | "ran"
  /** Fractions of the axis, from 0 to 1. */
  readonly from: number
  readonly to: number
  readonly seconds: number
}

export interface Line {
  readonly attempt: AttemptLine
  readonly bars: readonly Bar[]
}

export interface Axis {
  readonly seconds: number
  readonly lines: readonly Line[]
}

const AXIS_SECONDS_MIN = 0.001

type TimedJob = Pick<JobDetails, "attempts" | "submitted_at" | "completed_at">

export function axisOf(job: TimedJob, now: Date): Axis {
  const begin = Date.parse(job.submitted_at)
  const ends = job.attempts.map((attempt) => momentOf(attempt.ended_at) ?? now.getTime())
  const end = Math.max(momentOf(job.completed_at) ?? begin, ...ends, begin)
  const seconds = Math.max(AXIS_SECONDS_MIN, (end - begin) / 1000)
  const part = (moment: number) => Math.min(1, Math.max(0, (moment - begin) / 1000 / seconds))
  return {
    seconds,
    lines: job.attempts.map((attempt) => ({ attempt: attempt, bars: barsOf(attempt, part, now) })),
  }
}

function momentOf(text: string | null): number | null {
  return text === null ? null : Date.parse(text)
}

function barsOf(line: AttemptLine, part: (moment: number) => number, now: Date): Bar[] {
  const leased = Date.parse(line.leased_at)
  const queued = momentOf(line.queued_at) ?? leased
  const end = momentOf(line.ended_at) ?? now.getTime()
  const started = momentOf(line.started_at) ?? (line.outcome === null ? end : leased)
  const spans: [Bar["kind"], number, number][] = [
    ["waited", queued, leased],
    ["prepared", leased, started],
    ["ran", started, end],
  ]
  return spans
    .filter(([, from, to]) => to > from)
    .map(([kind, from, to]) => ({ kind, from: part(from), to: part(to), seconds: (to - from) / 1000 }))
}

/** Checks whether the tokens that were reserved for the job have been refunded. */
export function isRefunded(status: string): boolean {
  return status === "failed" || status === "cancelled"
}

/** Returns the new job's id if the job was retried. A job is retried only once. Another request
 * returns the same new job. */
export function retryOf({ audit }: Pick<JobDetails, "audit">): string | null {
  const entry = audit.findLast((entry) => entry.action === "retry" && entry.details.new_job)
  return entry ? String(entry.details.new_job) : null
}

/** Converts an attempt's outcome to a state that the pages show. */
export function stateOfOutcome(outcome: string | null): string {
  if (outcome === null) return "running"
  if (outcome === "requeued") return "cancelled"
  return outcome === "expired" ? "failed" : outcome
}
