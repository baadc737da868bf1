/** Keeps lists of graph runs up to date. */

import { cache, pathOf, useEvents } from "@/api"
import type { GraphRunSummaries, GraphRunSummary } from "@/api/schema"

export interface RunFilter {
  graph?: string | undefined
  status?: string | undefined
}

/** Applies an update to a page of runs. A known run is replaced, or removed if it no longer matches
 * the filter. A new run is added at the front. */
export function withRun(page: GraphRunSummaries, update: GraphRunSummary, of: RunFilter): GraphRunSummaries {
  const at = page.runs.findIndex((run) => run.id === update.id)
  const isListed = (!of.graph || of.graph === update.graph_id) && (!of.status || of.status === update.status)
  if (at >= 0 && isListed) return { ...page, runs: page.runs.with(at, update) }
  if (at >= 0) return { ...page, runs: page.runs.toSpliced(at, 1) }
  const first = page.runs[0]
  const isNew = !first || Date.parse(update.created_at) > Date.parse(first.created_at)
  return isListed && isNew ? { ...page, runs: [update, ...page.runs] } : page
}

/** Keeps the first page of a list up to date with events. */
export function useLiveRuns(key: string | null, of: RunFilter = {}): void {
  const path = pathOf("/api/graph-runs/events", { graph_id: of.graph })
  useEvents<GraphRunSummary>(key && path, (run, { event }) => {
    if (key && event === "run") cache.set<GraphRunSummaries>(key, (page) => page && withRun(page, run, of))
  })
}
