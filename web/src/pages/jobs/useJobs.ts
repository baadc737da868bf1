/** Reads the rows of a filter in pages of 200 by cursor, and keeps them up to date with the
 * operators' events. */

import { useCallback, useEffect, useRef, useState } from "react"
import { type ApiError, api, asApiError, useEvents } from "@/api"
import type { BulkFilter, JobListed, JobPage } from "@/api/schema"
import { hasNewJobs, type JobEvent, withEvents, withNewest, withPage } from "./rows"

export const EVENTS = "/api/admin/events"
const PAGE = 200
/** The maximum number of pages read in a row. With a filter by worker or error, a page may be empty
 * although later ones have rows. */
const PAGES_AT_ONCE_MAX = 20
const AGAIN_MS = 2_000

export interface Jobs {
  /** Undefined while the rows are being loaded. */
  readonly rows: readonly JobListed[] | undefined
  readonly hasMore: boolean
  readonly error: ApiError | null
  /** The pools whose databases are down. Their jobs are missing from the rows. */
  readonly leftOut: readonly string[]
  readonly loadMore: () => void
  readonly reload: () => void
}

interface State {
  rows: readonly JobListed[] | undefined
  next: string | null
  error: ApiError | null
  leftOut: readonly string[]
}

const NOTHING: State = { rows: undefined, next: null, error: null, leftOut: [] }

async function readPage(filter: BulkFilter, after: string | null, signal: AbortSignal): Promise<JobPage> {
  const query = { ...filter, limit: PAGE, after }
  return await api.get<JobPage>("/api/admin/jobs", { query, signal })
}

/** Reads pages until one has rows or there are no more pages. */
async function readNonEmptyPage(
  filter: BulkFilter,
  after: string | null,
  signal: AbortSignal,
): Promise<JobPage> {
  let page = await readPage(filter, after, signal)
  for (let read = 1; page.jobs.length === 0 && page.next !== null && read < PAGES_AT_ONCE_MAX; read += 1)
    page = await readPage(filter, page.next, signal)
  return page
}

export function useJobs(filter: BulkFilter, onNews?: () => void): Jobs {
  const key = JSON.stringify(filter)
  const [state, setState] = useState<State>(NOTHING)
  const latest = useRef({ filter, state, onNews })
  latest.current = { filter, state, onNews }
  const abort = useRef(new AbortController())
  const isReading = useRef(false)
  const isMissed = useRef(false)
  const again = useRef<ReturnType<typeof setTimeout> | null>(null)

  const read = useCallback(async (kind: "first" | "more" | "newest") => {
    if (isReading.current) {
      isMissed.current ||= kind === "newest"
      return
    }
    isReading.current = true
    const { signal } = abort.current
    try {
      const after = kind === "more" ? latest.current.state.next : null
      const page = await readNonEmptyPage(latest.current.filter, after, signal)
      if (signal.aborted) return
      setState((old) => merged(old, page, kind))
    } catch (thrown) {
      if (!signal.aborted) setState((old) => ({ ...old, error: asApiError(thrown) }))
    } finally {
      if (!signal.aborted) {
        isReading.current = false
        // Changes that were made during this read are missing from it.
        if (isMissed.current) {
          isMissed.current = false
          void read("newest")
        }
      }
    }
  }, [])

  // biome-ignore lint/correctness/useExhaustiveDependencies: the list is read again when the filter changes
  useEffect(() => {
    abort.current = new AbortController()
    isReading.current = false
    isMissed.current = false
    setState(NOTHING)
    void read("first")
    const { current } = abort
    return () => {
      current.abort()
      if (again.current) clearTimeout(again.current)
      again.current = null
    }
  }, [key, read])

  const readNewest = useCallback(() => {
    again.current ??= setTimeout(() => {
      again.current = null
      void read("newest")
      latest.current.onNews?.()
    }, AGAIN_MS)
  }, [read])

  useEvents<{ jobs: JobEvent[] }>(EVENTS, (data, { event }) => {
    if (event !== "jobs") return
    const { filter: currentFilter, state: seen } = latest.current
    if (!seen.rows) {
      // The event stream is back, so the rows may be readable again.
      if (seen.error?.isTemporary) void read("first")
      return
    }
    if (hasNewJobs(seen.rows, data.jobs, currentFilter)) readNewest()
    const rows = withEvents(seen.rows, data.jobs, currentFilter)
    if (rows === seen.rows) return
    if (rows.length !== seen.rows.length) readNewest()
    setState((old) => (old.rows ? { ...old, rows: withEvents(old.rows, data.jobs, currentFilter) } : old))
  })

  return {
    rows: state.rows,
    hasMore: state.next !== null,
    error: state.error,
    leftOut: state.leftOut,
    loadMore: useCallback(() => void read("more"), [read]),
    reload: useCallback(() => {
      void read(latest.current.state.rows ? "newest" : "first")
      latest.current.onNews?.()
    }, [read]),
  }
}

function merged(old: State, page: JobPage, kind: "first" | "more" | "newest"): State {
  const rest = { error: null, leftOut: page.pools_left_out }
  if (kind === "first" || !old.rows) return { ...rest, rows: page.jobs, next: page.next }
  if (kind === "more") return { ...rest, rows: withPage(old.rows, page.jobs), next: page.next }
  const rows = withNewest(old.rows, page.jobs, page.next === null)
  // If older rows remain below the new ones, the next page still follows the older rows.
  return {
    ...rest,
    rows,
    next: page.next === null || rows.length === page.jobs.length ? page.next : old.next,
  }
}
