/** Reads the stored graphs that nodes contain: the available graphs, and their ports. */

import { useEffect, useMemo, useRef, useState } from "react"
import { api, pathOf, useQuery } from "@/api"
import type { GraphPage, GraphPorts, GraphSummary } from "@/api/schema"
import { graphPath } from "@/app/reads"
import type { GraphDocument } from "./document"
import { bodyOf } from "./names"
import type { InnerOf } from "./types"

type Named = Readonly<Record<string, unknown>>

function pathOfPorts({ graph, version }: Named): string | null {
  if (typeof graph !== "string" || graph === "" || typeof version !== "number") return null
  return pathOf(`${graphPath(graph)}/ports`, { version })
}

function pathsIn(document: GraphDocument): string {
  const named = document.nodes.flatMap((each): Named[] =>
    each.type === "graph" ? [each] : each.type === "map" || each.type === "loop" ? [bodyOf(each)] : [],
  )
  return [...new Set(named.flatMap((each) => pathOfPorts(each) ?? []))].sort().join(" ")
}

/** Returns the ports of all graphs that a document names. Graphs that can't be read appear among
 * the document's problems. */
export function useInner(document: GraphDocument): InnerOf {
  const paths = pathsIn(document)
  // A version never changes, so it is read only once.
  const [known, setKnown] = useState<ReadonlyMap<string, GraphPorts>>(() => new Map())
  const latest = useRef(known)
  latest.current = known
  useEffect(() => {
    const abort = new AbortController()
    const missing = paths.split(" ").filter((each) => each && !latest.current.has(each))
    for (const path of missing)
      api.get<GraphPorts>(path, { signal: abort.signal }).then(
        (ports) => setKnown((before) => new Map(before).set(path, ports)),
        () => undefined,
      )
    return () => abort.abort()
  }, [paths])
  return useMemo<InnerOf>(
    () => (named) => {
      const path = pathOfPorts(named)
      return path === null ? undefined : known.get(path)
    },
    [known],
  )
}

const GRAPHS_MAX = 100
const NONE: readonly GraphSummary[] = []

/** Returns the graphs that can be nested, newest first. */
export function useGraphs(): readonly GraphSummary[] {
  const found = useQuery<GraphPage>("/api/graphs", { query: { limit: GRAPHS_MAX }, freshSeconds: 10 })
  return found.data?.graphs ?? NONE
}
