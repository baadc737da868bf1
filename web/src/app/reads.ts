/** The first requests of large pages, which start while the page's code is loading. */

import { pathOf } from "@/api"

export const OFFERS = "/api/workflows"

export function graphPath(id: string): string {
  return `/api/graphs/${encodeURIComponent(id)}`
}

const EXECUTIONS_MAX = 1_000

/** Returns the API path of a graph run, including the graph in the version that ran. */
export function graphRunPath(id: string, hasGraph = true): string {
  const query = { urls: true, document: hasGraph || undefined, executions: EXECUTIONS_MAX }
  return pathOf(`/api/graph-runs/${encodeURIComponent(id)}`, query)
}
