/** Reads the graphs that can be nested in a node, and their ports. */

import { useEffect, useMemo, useRef, useState } from "react"
import { api, pathOf, useQuery } from "@/api"
import type { GraphPage, GraphPorts, GraphSummary } from "@/api/schema"
import { graphPath } from "@/app/reads"
import type { GraphDocument } from "./document"
import { bodyOf } from "./names"
import type { InnerOf } from "./types"

type GraphReference = Readonly<Record<string, unknown>>

function pathOfPorts({ graph, version }: GraphReference): string | null {
  if (typeof graph !== "string" || graph === "" || typeof version !== "number") return null
  return pathOf(`${graphPath(graph)}/ports`, { version })
}

function pathsIn(document: GraphDocument): string {
  const named = document.nodes.flatMap((node): GraphReference[] =>
    node.type === "graph" ? [node] : node.type === "map" || node.type === "loop" ? [bodyOf(node)] : [],
  )
  return [...new Set(named.flatMap((graph) => pathOfPorts(graph) ?? []))].sort().join(" ")
}

/** Returns the ports of all graphs that a document names. Graphs that can't be read appear among
 * the document's problems. */
export function useInner(document: GraphDocument): InnerOf {
  const paths = pathsIn(document)
  // A version never changes, so it is read only once.
  const [loaded, setLoaded] = useState<ReadonlyMap<string, GraphPorts>>(() => new Map())
  const latest = useRef(loaded)
  latest.current = loaded
  useEffect(() => {
    const abort = new AbortController()
    const missing = paths.split(" ").filter((path) => path && !latest.current.has(path))
    for (const path of missing)
      api.get<GraphPorts>(path, { signal: abort.signal }).then(
        (ports) => setLoaded((before) => new Map(before).set(path, ports)),
        () => undefined,
      )
    return () => abort.abort()
  }, [paths])
  return useMemo<InnerOf>(
    () => (named) => {
      const path = pathOfPorts(named)
      return path === null ? undefined : loaded.get(path)
    },
    [loaded],
  )
}

const GRAPHS_MAX = 100
const NONE: readonly GraphSummary[] = []

/** Returns the graphs that can be nested, newest first. */
export function useGraphs(): readonly GraphSummary[] {
  const query = useQuery<GraphPage>("/api/graphs", { query: { limit: GRAPHS_MAX }, freshSeconds: 10 })
  return query.data?.graphs ?? NONE
}
