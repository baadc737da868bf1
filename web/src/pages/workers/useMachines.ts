/** Reads workers, fleets and the workflows that each worker can run, and keeps them up to date with
 * the operators' events. */

import { useCallback, useEffect, useRef, useState } from "react"
import { api, cache, pathOf, type QueryResult, useEvents, useQuery } from "@/api"
import type { Fleets, Matrix, Overview, OverviewNow, Workers } from "@/api/schema"
import { type JobNews, type WorkersEvent, withJobs, withWorkers } from "./machines"

export const EVENTS = "/api/admin/events"
export const WORKERS = "/api/admin/workers"
export const FLEETS = "/api/admin/fleets"
export const MATRIX = "/api/admin/matrix"
const PAGE = 1000
const PAGES_MAX = 10
const READ_MS = 15_000
const SOON_MS = 500

/** Reads all pages of workers, up to a limit. */
async function readWorkers(signal: AbortSignal): Promise<Workers> {
  let all = await api.get<Workers>(WORKERS, { query: { limit: PAGE }, signal })
  for (let page = 1; all.next !== null && page < PAGES_MAX; page += 1) {
    const more = await api.get<Workers>(WORKERS, { query: { limit: PAGE, after: all.next }, signal })
    all = { workers: [...all.workers, ...more.workers], next: more.next }
  }
  return all
}

const KEY = pathOf(WORKERS, { limit: PAGE })

export function useWorkers(): QueryResult<Workers> {
  const workers = useQuery<Workers>(WORKERS, { query: { limit: PAGE }, read: readWorkers, freshSeconds: 2 })
  const { reload } = workers
  const soon = useRef<ReturnType<typeof setTimeout> | null>(null)
  const reloadSoon = useCallback(() => {
    soon.current ??= setTimeout(() => {
      soon.current = null
      readAgain()
    }, SOON_MS)
  }, [])
  // Events contain neither readings nor the workers' last contact, so workers are read again
  // periodically.
  useEffect(() => {
    const timer = setInterval(() => {
      if (document.visibilityState === "visible") reload()
    }, READ_MS)
    return () => {
      clearInterval(timer)
      if (soon.current) clearTimeout(soon.current)
      soon.current = null
    }
  }, [reload])
  useEvents<WorkersEvent & { jobs: readonly JobNews[] }>(EVENTS, (data, { event }) => {
    const seen = cache.entry<Workers>(KEY).data
    if (!seen || (event !== "workers" && event !== "jobs")) return
    if (event === "jobs") {
      const next = withJobs(seen.workers, data.jobs)
      if (next !== seen.workers) cache.set<Workers>(KEY, () => ({ ...seen, workers: [...next] }))
      return
    }
    const { workers: next, isUnknown } = withWorkers(seen.workers, data)
    cache.set<Workers>(KEY, () => ({ ...seen, workers: [...next] }))
    if (isUnknown) reloadSoon()
  })
  return workers
}

export function useFleets(): QueryResult<Fleets> {
  return useQuery<Fleets>(FLEETS, { freshSeconds: 10 })
}

export function useMatrix(): QueryResult<Matrix> {
  return useQuery<Matrix>(MATRIX, { freshSeconds: 10 })
}

const OVERVIEW = "/api/admin/overview"

/** Returns, by fleet name, the number of queued jobs that each fleet could run. Returns undefined
 * until the numbers are known. */
export function useWaiting(): Readonly<Record<string, number>> | undefined {
  const read = useQuery<Overview>(OVERVIEW, { query: { range: "1h" }, freshSeconds: 10 }).data
  const [live, setLive] = useState<Readonly<Record<string, number>>>()
  useEvents<OverviewNow>(EVENTS, ({ waiting }, { event }) => {
    if (event !== "counts") return
    setLive((before) => (JSON.stringify(before) === JSON.stringify(waiting) ? before : waiting))
  })
  return live ?? read?.now.waiting
}

/** Reloads the data after an action on a worker or a fleet. */
export function readAgain(): void {
  for (const path of [WORKERS, FLEETS, MATRIX, OVERVIEW]) cache.invalidate(path)
}
