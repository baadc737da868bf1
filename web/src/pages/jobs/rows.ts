/** Updates the rows of the list from later pages, a new read of the first page, and events. */

import type { BulkFilter, DispatchStatus, JobListed, JobStatus } from "@/api/schema"
import { isMatch } from "./filter"

/** The fields of a job in the operators' events. */
export interface JobEvent {
  id: string
  tenant_id: string
  workflow: string
  status: DispatchStatus
  priority: number
  attempt: number
  worker_id: string | null
  percent: number | null
  error: string | null
  started_at: string | null
  ended_at: string | null
}

const STATUS_OF: Readonly<Record<DispatchStatus, JobStatus>> = {
  queued: "queued",
  leased: "processing",
  completed: "completed",
  failed: "failed",
  cancelled: "cancelled",
}

export function statusOf(event: JobEvent): JobStatus {
  return STATUS_OF[event.status] ?? "queued"
}

function isOlder(row: JobListed, than: JobListed): boolean {
  if (row.submitted_at !== than.submitted_at) return row.submitted_at < than.submitted_at
  return row.id < than.id
}

export function withPage(rows: readonly JobListed[], page: readonly JobListed[]): JobListed[] {
  const ids = new Set(rows.map((job) => job.id))
  return [...rows, ...page.filter((job) => !ids.has(job.id))]
}

/** Applies a new read of the first page. It replaces the rows in its range. Older rows stay as
 * they were. */
export function withNewest(
  rows: readonly JobListed[],
  newest: readonly JobListed[],
  isWhole: boolean,
): JobListed[] {
  const last = newest.at(-1)
  if (isWhole || !last) return [...newest]
  return withPage(
    newest,
    rows.filter((job) => isOlder(job, last)),
  )
}

/** Applies events in place and removes rows that no longer match the filter. Unchanged rows keep
 * the same objects. */
export function withEvents(
  rows: readonly JobListed[],
  events: readonly JobEvent[],
  filter: BulkFilter,
): readonly JobListed[] {
  const eventsById = new Map(events.map((event) => [event.id, event]))
  if (!rows.some((row) => eventsById.has(row.id))) return rows
  return rows
    .map((row) => {
      const event = eventsById.get(row.id)
      return event ? changed(row, event) : row
    })
    .filter((row) => isMatch(filter, row))
}

function changed(row: JobListed, event: JobEvent): JobListed {
  const status = statusOf(event)
  const isFailed = status === "failed"
  return {
    ...row,
    status,
    priority: event.priority,
    attempt: event.attempt,
    worker_id: event.worker_id ?? row.worker_id,
    percent: event.percent,
    error: isFailed ? (row.error ?? event.error) : row.error,
    started_at: event.started_at ?? row.started_at,
    completed_at: event.ended_at ?? row.completed_at,
  }
}

/** Checks whether events report a job that belongs in the list but isn't there yet. */
export function hasNewJobs(
  rows: readonly JobListed[],
  events: readonly JobEvent[],
  filter: BulkFilter,
): boolean {
  const ids = new Set(rows.map((job) => job.id))
  return events.some(
    (event) =>
      !ids.has(event.id) &&
      isMatch(filter, { status: statusOf(event) }) &&
      (!filter.tenant || filter.tenant === event.tenant_id) &&
      (!filter.workflow || filter.workflow === event.workflow) &&
      (!filter.worker || filter.worker === event.worker_id),
  )
}

/** Returns the seconds that a job waited and ran, or null where they are unknown. */
export function spansOf(row: JobListed, now: Date): { waited: number | null; ran: number | null } {
  const [submitted, started, ended] = [row.submitted_at, row.started_at, row.completed_at].map((time) =>
    time === null ? null : Date.parse(time),
  ) as [number, number | null, number | null]
  const until = started ?? ended ?? now.getTime()
  return {
    waited: Math.max(0, (until - submitted) / 1000),
    ran: started === null ? null : Math.max(0, ((ended ?? now.getTime()) - started) / 1000),
  }
}
