/** Positions nodes from left to right along their connections. dagre is loaded on first use. */

import { type GraphDocument, own, type Place, type Places, sourceOf, targetOf } from "./document"
import { namesIn } from "./names"

export interface Size {
  readonly width: number
  readonly height: number
}

const USUAL: Size = { width: 232, height: 220 }
const APART = { nodes: 36, ranks: 90 }
/** Graphs with more nodes than this get a faster layout, which takes a third of the time but has
 * more crossings. */
const NODES_MANY = 100

/** Loads the layout library before it is needed. */
export function loadLayout(): void {
  import("@dagrejs/dagre").catch(() => undefined)
}

/** Calculates the positions of all nodes. With `sizeOf`, it uses the real node sizes and always the
 * slower layout with fewer crossings, because the user has asked for it. */
export async function placesFor(
  document: GraphDocument,
  sizeOf?: (id: string) => Size | undefined,
): Promise<Places> {
  const dagre = await import("@dagrejs/dagre")
  const graph = new dagre.Graph()
  const isQuick = !sizeOf && document.nodes.length > NODES_MANY
  const ranker = isQuick ? "longest-path" : "network-simplex"
  graph.setGraph({ rankdir: "LR", nodesep: APART.nodes, ranksep: APART.ranks, ranker })
  graph.setDefaultEdgeLabel(() => ({}))
  for (const { id } of document.nodes) graph.setNode(keyOf(id), { ...(sizeOf?.(id) ?? USUAL) })
  for (const { from, to } of [...document.connections, ...namesIn(document)]) {
    const ends = [keyOf(sourceOf(from).node), keyOf(targetOf(to).node)] as const
    if (ends.every((end) => graph.hasNode(end))) graph.setEdge(...ends)
  }
  dagre.layout(graph, { disableOptimalOrderHeuristic: isQuick })
  const places: Record<string, Place> = {}
  for (const { id } of document.nodes) {
    const { x, y, width, height } = graph.node(keyOf(id)) as { x: number; y: number } & Size
    places[id] = { x: Math.round(x - width / 2), y: Math.round(y - height / 2) }
  }
  return places
}

/** Prefixes the id, because dagre stores nodes in plain objects, where `constructor` already has
 * a meaning. */
function keyOf(id: string): string {
  return `node ${id}`
}

/** Keeps existing positions and adds positions for the other nodes, without overlaps. */
export function filledPlaces(existing: Places, calculated: Places): Places {
  const places: Record<string, Place> = { ...existing }
  for (const [id, place] of Object.entries(calculated))
    if (!own(places, id)) places[id] = freePlace(place, Object.values(places))
  return places
}

/** Returns the position itself or the nearest free one below it. Searches in one pass from top
 * to bottom. */
function freePlace({ x, y }: Place, places: readonly Place[]): Place {
  const step = USUAL.height / 4
  const beside = places.filter((place) => Math.abs(place.x - x) < USUAL.width).map((place) => place.y)
  let free = y
  for (const top of beside.sort((one, other) => one - other))
    if (Math.abs(top - free) < USUAL.height) free = y + Math.ceil((top + USUAL.height - y) / step) * step
  return { x, y: free }
}

const STORAGE_PREFIX = "comfyfleet.graph-places."

/** Returns the positions saved with the version, updated with the changes that the user has made
 * since then in this browser. */
export function placesOf(graph: { id: string; version: number; document: unknown }): Places {
  const { layout } = graph.document as { layout?: Record<string, [number, number]> }
  const saved = Object.entries(layout ?? {}).map(([id, [x, y]]) => [id, { x, y }] as const)
  return { ...Object.fromEntries(saved), ...storedPlaces(graph.id, graph.version) }
}

/** Returns the document with its node positions, ready to be stored. */
export function withLayout(document: GraphDocument, places: Places): GraphDocument {
  const entries = document.nodes.flatMap(({ id }) => {
    const place = own(places, id)
    return place ? [[id, [place.x, place.y]] as const] : []
  })
  const layout = Object.fromEntries(entries)
  return entries.length > 0 ? ({ ...document, layout } as GraphDocument) : document
}

function storedPlaces(graphId: string, version: number): Places {
  try {
    const stored = JSON.parse(localStorage.getItem(STORAGE_PREFIX + graphId) ?? "{}")
    return stored.version === version ? (stored.places as Places) : {}
  } catch {
    return {}
  }
}

export function keepPlaces(graphId: string, version: number, places: Places): void {
  try {
    localStorage.setItem(STORAGE_PREFIX + graphId, JSON.stringify({ version, places }))
  } catch {
    // The storage is full, so the graph is laid out again next time.
  }
}
