/** What large pages read first. It is asked for while their code is on its way. */

import { pathOf } from "@/api"

export const OFFERS = "/api/workflows"

export function graphPath(id: string): string {
  return `/api/graphs/${encodeURIComponent(id)}`
}

const EXECUTIONS_MAX = 1_000

/** A run, with its graph as it was run. */
export function graphRunPath(id: string, hasGraph = true): string {
  const query = { urls: true, document: hasGraph || undefined, executions: EXECUTIONS_MAX }
  return pathOf(`/api/graph-runs/${encodeURIComponent(id)}`, query)
}
