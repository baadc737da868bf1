/** Gives nodes new ids: renames them, or copies them with the connections and names between
 * them. Pure functions. */

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

/** Renames a node, including its connections, merges over it, and all names that refer to it. */
export function rename(document: GraphDocument, before: string, after: string): GraphDocument {
  const moved = (text: string) =>
    text.startsWith(`${before}.`) ? `${after}${text.slice(before.length)}` : text
  const names = new Map([[before, after]])
  return {
    ...document,
    nodes: document.nodes.map((each) => ({
      ...withNames(each, names),
      id: each.id === before ? after : each.id,
    })),
    connections: document.connections.map(({ from, to }) => ({ from: moved(from), to: moved(to) })),
  }
}

export interface Clip {
  readonly nodes: readonly GraphNode[]
  readonly connections: readonly Connection[]
  readonly places: Places
}

/** Returns nodes with the connections between them. */
export function clipOf(document: GraphDocument, places: Places, ids: ReadonlySet<string>): Clip {
  return {
    nodes: document.nodes.filter((each) => ids.has(each.id)),
    connections: document.connections.filter(
      ({ from, to }) => ids.has(sourceOf(from).node) && ids.has(targetOf(to).node),
    ),
    places: Object.fromEntries(Object.entries(places).filter(([id]) => ids.has(id))),
  }
}

const PASTED_PIXELS = 40

/** Inserts copies with free ids, and returns those ids as well. */
export function paste(
  document: GraphDocument,
  places: Places,
  clip: Clip,
): { document: GraphDocument; places: Places; ids: string[] } {
  let made: GraphDocument = document
  const names = new Map<string, string>()
  const put: Record<string, Place> = { ...places }
  for (const node of clip.nodes) {
    const id = freeId(made, node.id.replace(/_\d+$/, ""))
    names.set(node.id, id)
    made = addNode(made, { ...node, id })
    const place = own(clip.places, node.id) ?? { x: 0, y: 0 }
    put[id] = { x: place.x + PASTED_PIXELS, y: place.y + PASTED_PIXELS }
  }
  const copies = new Set(names.values())
  made = {
    ...made,
    nodes: made.nodes.map((each) => (copies.has(each.id) ? withNames(each, names) : each)),
    connections: [...made.connections, ...clip.connections.map((each) => renamed(each, names))],
  }
  return { document: made, places: put, ids: [...names.values()] }
}

function renamed({ from, to }: Connection, names: ReadonlyMap<string, string>): Connection {
  const source = sourceOf(from)
  const target = targetOf(to)
  return {
    from: [names.get(source.node), source.port, ...source.path].join("."),
    to: `${names.get(target.node)}.${target.port}`,
  }
}
