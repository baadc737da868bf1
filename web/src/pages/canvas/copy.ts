/** Renames and copies nodes, together with the connections and references between them. Pure
 * functions. */

import {
  addNode,
  type Connection,
  freeId,
  type GraphDocument,
  type GraphNode,
  own,
  type Place,
  type Places,
  sourceOf,
  targetOf,
} from "./document"
import { withNames } from "./names"

/** Renames a node, and updates all connections and names that refer to it. */
export function rename(document: GraphDocument, before: string, after: string): GraphDocument {
  const moved = (text: string) =>
    text.startsWith(`${before}.`) ? `${after}${text.slice(before.length)}` : text
  const names = new Map([[before, after]])
  return {
    ...document,
    nodes: document.nodes.map((node) => ({
      ...withNames(node, names),
      id: node.id === before ? after : node.id,
    })),
    connections: document.connections.map(({ from, to }) => ({ from: moved(from), to: moved(to) })),
  }
}

export interface Clip {
  readonly nodes: readonly GraphNode[]
  readonly connections: readonly Connection[]
  readonly places: Places
}

/** Returns the nodes with these ids, with the connections between them and their positions. */
export function clipOf(document: GraphDocument, places: Places, ids: ReadonlySet<string>): Clip {
  return {
    nodes: document.nodes.filter((node) => ids.has(node.id)),
    connections: document.connections.filter(
      ({ from, to }) => ids.has(sourceOf(from).node) && ids.has(targetOf(to).node),
    ),
    places: Object.fromEntries(Object.entries(places).filter(([id]) => ids.has(id))),
  }
}

const PASTED_PIXELS = 40

/** Pastes copies of the nodes under unused ids, and returns the new ids as well. */
export function paste(
  document: GraphDocument,
  places: Places,
  clip: Clip,
): { document: GraphDocument; places: Places; ids: string[] } {
  let result: GraphDocument = document
  const names = new Map<string, string>()
  const put: Record<string, Place> = { ...places }
  for (const node of clip.nodes) {
    const id = freeId(result, node.id.replace(/_\d+$/, ""))
    names.set(node.id, id)
    result = addNode(result, { ...node, id })
    const place = own(clip.places, node.id) ?? { x: 0, y: 0 }
    put[id] = { x: place.x + PASTED_PIXELS, y: place.y + PASTED_PIXELS }
  }
  const copies = new Set(names.values())
  result = {
    ...result,
    nodes: result.nodes.map((node) => (copies.has(node.id) ? withNames(node, names) : node)),
    connections: [...result.connections, ...clip.connections.map((connection) => renamed(connection, names))],
  }
  return { document: result, places: put, ids: [...names.values()] }
}

function renamed({ from, to }: Connection, names: ReadonlyMap<string, string>): Connection {
  const source = sourceOf(from)
  const target = targetOf(to)
  return {
    from: [names.get(source.node), source.port, ...source.path].join("."),
    to: `${names.get(target.node)}.${target.port}`,
  }
}
