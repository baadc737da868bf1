/** Places for nodes, from left to right along the wires. dagre is loaded when it is first needed. */

import { type GraphDocument, own, type Place, type Places, sourceOf, targetOf } from "./document"
import { namesIn } from "./names"

export interface Size {
  readonly width: number
  readonly height: number
}

const USUAL: Size = { width: 232, height: 220 }
const APART = { nodes: 36, ranks: 90 }
/** More nodes than these are put somewhere quickly, with more crossings, in a third of the time. */
const NODES_MANY = 100

/** Loads what arranges nodes, before it is needed. */
export function loadLayout(): void {
  import("@dagrejs/dagre").catch(() => undefined)
}

/** With the sizes of nodes, as somebody asks for it who waits: with as few crossings as can be. */
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
    if (ends.every((each) => graph.hasNode(each))) graph.setEdge(...ends)
  }
  dagre.layout(graph, { disableOptimalOrderHeuristic: isQuick })
  const places: Record<string, Place> = {}
  for (const { id } of document.nodes) {
    const { x, y, width, height } = graph.node(keyOf(id)) as { x: number; y: number } & Size
    places[id] = { x: Math.round(x - width / 2), y: Math.round(y - height / 2) }
  }
  return places
}

/** dagre keeps nodes in plain objects, in which `constructor` is something else. */
function keyOf(id: string): string {
  return `node ${id}`
}

/** Places of one's own stay; those without one get theirs, and nothing stands on another. */
export function filledPlaces(kept: Places, found: Places): Places {
  const places: Record<string, Place> = { ...kept }
  for (const [id, place] of Object.entries(found))
    if (!own(places, id)) places[id] = freePlace(place, Object.values(places))
  return places
}

/** The place itself, or the nearest below it in steps; looked for from the top to the bottom, once. */
function freePlace({ x, y }: Place, taken: readonly Place[]): Place {
  const step = USUAL.height / 4
  const beside = taken.filter((each) => Math.abs(each.x - x) < USUAL.width).map((each) => each.y)
  let free = y
  for (const each of beside.sort((one, other) => one - other))
    if (Math.abs(each - free) < USUAL.height) free = y + Math.ceil((each + USUAL.height - y) / step) * step
  return { x, y: free }
}

const KEPT_PREFIX = "comfyfleet.graph-places."

/** Where nodes were when a version was saved; and as a person has left them since, in this browser. */
export function placesOf(graph: { id: string; version: number; document: unknown }): Places {
  const { layout } = graph.document as { layout?: Record<string, [number, number]> }
  const saved = Object.entries(layout ?? {}).map(([id, [x, y]]) => [id, { x, y }] as const)
  return { ...Object.fromEntries(saved), ...keptPlaces(graph.id, graph.version) }
}

/** The document as it is stored. */
export function withLayout(document: GraphDocument, places: Places): GraphDocument {
  const known = document.nodes.flatMap(({ id }) => {
    const place = own(places, id)
    return place ? [[id, [place.x, place.y]] as const] : []
  })
  const layout = Object.fromEntries(known)
  return known.length > 0 ? ({ ...document, layout } as GraphDocument) : document
}

function keptPlaces(graphId: string, version: number): Places {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT_PREFIX + graphId) ?? "{}")
    return kept.version === version ? (kept.places as Places) : {}
  } catch {
    return {}
  }
}

export function keepPlaces(graphId: string, version: number, places: Places): void {
  try {
    localStorage.setItem(KEPT_PREFIX + graphId, JSON.stringify({ version, places }))
  } catch {
    // There is no room: the graph is laid out anew next time.
  }
}
