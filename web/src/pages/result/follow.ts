/** Follows a job while the user waits for it: reads it once, then applies events. */

import { useEffect, useRef, useState } from "react"
import { cache, useEvents, useQuery } from "@/api"
import type { FollowedJob } from "@/api/schema"

export const ACCOUNT_EVENTS = "/api/account/events?previews=true"
/** Milliseconds between reads of the job. Events report every change, so these reads only matter
 * in browsers without a working event stream. */
const REREAD_MS = 15_000
const TICK_MS = 250

export function isActive(job: Pick<FollowedJob, "status">): boolean {
  return job.status === "queued" || job.status === "processing"
}

/** Applies the latest report to a job. A final status is never undone, and the percentage only
 * grows. */
export function merged(before: FollowedJob | undefined, update: FollowedJob): FollowedJob {
  if (!before || before.id !== update.id) return update
  if (!isActive(before) && isActive(update)) return before
  const isSameRun = before.started_at === update.started_at
  if (!isSameRun || before.progress === null || update.progress === null) return update
  return { ...update, progress: Math.max(before.progress, update.progress) }
}

export interface Fill {
  /** The filled fraction of the bar, from 0 to 1. */
  part: number
  /** True if the progress was measured. Only measured progress is shown as a percentage. */
  isReal: boolean
}

/** Returns the progress as measured, or else estimated from the effect's history and from the
 * `readMs` milliseconds since the job was read. */
export function fillOf(job: FollowedJob, readMs: number): Fill {
  if (job.status === "completed") return { part: 1, isReal: true }
  if (job.progress !== null) return { part: job.progress / 100, isReal: true }
  const { expected_progress: expected, seconds_left: secondsLeft } = job
  if (expected === null) return { part: 0, isReal: false }
  const rate = secondsLeft && secondsLeft > 0 ? (100 - expected) / (secondsLeft * 1000) : 0
  return { part: Math.min(95, expected + rate * readMs) / 100, isReal: false }
}

export interface Followed {
  job: FollowedJob | undefined
  error: ReturnType<typeof useQuery>["error"]
  preview: string | null
  reload: () => void
}

export function useFollowed(id: string): Followed {
  const path = `/api/ai-jobs/${encodeURIComponent(id)}/progress`
  const query = useQuery<FollowedJob>(path)
  const [preview, setPreview] = useState<string | null>(null)
  const job = query.data
  const isOn = job === undefined || isActive(job)
  const reload = useRef(query.reload)
  reload.current = query.reload
  useEvents<JobUpdate>(isOn && query.error?.status !== 404 ? ACCOUNT_EVENTS : null, (data, { event }) => {
    if (event === "job" && data.id === id) cache.set<FollowedJob>(path, (before) => merged(before, data))
    else if (event === "preview" && data.job_id === id) setPreview(data.preview)
    else if (event === "wallet") {
      cache.invalidate("/api/wallet")
      // On the first event of a stream, reads the job again to catch what happened before the
      // stream began.
      reload.current()
    }
  })
  useEffect(() => {
    if (!isOn) return undefined
    const timer = setInterval(() => reload.current(), REREAD_MS)
    return () => clearInterval(timer)
  }, [isOn])
  return { job, error: query.error, preview, reload: query.reload }
}

type JobUpdate = FollowedJob & { job_id: string; preview: string }

/** Returns the milliseconds since the value `of` last changed. */
export function useSince(of: unknown, isOn: boolean): number {
  const start = useRef({ of, at: performance.now() })
  if (start.current.of !== of) start.current = { of, at: performance.now() }
  const [, tick] = useState(0)
  useEffect(() => {
    if (!isOn) return undefined
    const timer = setInterval(() => tick((count) => count + 1), TICK_MS)
    return () => clearInterval(timer)
  }, [isOn])
  return performance.now() - start.current.at
}
