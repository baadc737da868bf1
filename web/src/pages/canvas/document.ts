/** A graph's document in the API's form, and the functions that change it. They are pure: every
 * change returns a new document. */

export const NODE_KINDS = [
  "input",
  "workflow",
  "condition",
  "fanout",
  "merge",
  "value",
  "switch",
  "approve",
  "map",
  "loop",
  "graph",
  "score",
  "output",
] as const
export type NodeKind = (typeof NODE_KINDS)[number]

export interface GraphNode {
  readonly id: string
  readonly type: NodeKind
  readonly [field: string]: unknown
}

export interface Connection {
  /** The source as node.port, or a path inside the port's value, such as node.port.images.0. */
  readonly from: string
  /** node.port */
  readonly to: string
}

/** The settings of a whole graph, apart from its name. */
export const SETTINGS = ["max_tokens", "reuse", "priority", "at_once", "deadline"] as const
export type Settings = Readonly<Partial<Record<(typeof SETTINGS)[number], number | boolean>>>

export interface GraphDocument extends Settings {
  readonly name: string
  readonly nodes: readonly GraphNode[]
  readonly connections: readonly Connection[]
}

export interface Place {
  readonly x: number
  readonly y: number
}
export type Places = Readonly<Record<string, Place>>

export interface Source {
  readonly node: string
  readonly port: string
  readonly path: readonly string[]
}

const KINDS: readonly string[] = NODE_KINDS
/** The API's default values for each type of node. Fields with these values are omitted to keep
 * documents short. */
const USUAL: Record<NodeKind, Record<string, unknown>> = {
  input: { value_type: "any" },
  workflow: {
    version: "latest",
    fallback_strategy: "none",
    retries: 0,
    priority: 0,
    continue_on_error: false,
  },
  condition: {},
  fanout: { mode: "broadcast", output_count: 2, per_item: false, max_items: 100 },
  merge: { mode: "collect" },
  value: {},
  switch: {},
  approve: { pick: false, on_deadline: "fail" },
  map: { max_items: 100, continue_on_error: false },
  loop: {},
  graph: {},
  score: { max_items: 100 },
  output: {},
}

export function sourceOf(from: string): Source {
  const [node = "", port = "", ...path] = from.split(".")
  return { node, port, path }
}

/** Returns the canvas node that contains this one: `refine` for `refine/do`. */
export function outerOf(id: string): string {
  return id.split("/")[0] ?? id
}

export function targetOf(to: string): { node: string; port: string } {
  const dot = to.indexOf(".")
  return dot < 0 ? { node: to, port: "" } : { node: to.slice(0, dot), port: to.slice(dot + 1) }
}

export function propertiesOf(node: GraphNode): Readonly<Record<string, unknown>> {
  return isRecord(node.properties) ? node.properties : {}
}

/** Returns the record's own value and ignores inherited ones, because a node may be named
 * `constructor`. */
export function own<T>(record: Readonly<Record<string, T>>, name: string): T | undefined {
  return Object.hasOwn(record, name) ? record[name] : undefined
}

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value)
}

/** Parses an unchecked document. Returns null if it can't be drawn. Nodes that can't be parsed are
 * left out. */
export function documentOf(value: unknown): GraphDocument | null {
  if (!isRecord(value) || !Array.isArray(value.nodes ?? [])) return null
  const rawNodes = (value.nodes ?? []) as unknown[]
  const wires: Connection[] = []
  const nodes: GraphNode[] = []
  for (const rawNode of rawNodes) {
    const node = nodeOf(rawNode, wires, value)
    if (node && !nodes.some(({ id }) => id === node.id)) nodes.push(node)
  }
  const rawConnections = Array.isArray(value.connections) ? value.connections : []
  for (const connection of rawConnections)
    if (isRecord(connection) && typeof connection.from === "string" && typeof connection.to === "string")
      wires.push({ from: connection.from, to: connection.to })
  const name = typeof value.name === "string" ? value.name : ""
  return { name, ...settingsOf(value), nodes, connections: wires }
}

function settingsOf(value: Readonly<Record<string, unknown>>): Settings {
  const settings = SETTINGS.map((name) => [name, value[name]] as const)
  return Object.fromEntries(
    settings.filter(([, setting]) => typeof setting === "number" || typeof setting === "boolean"),
  )
}

/** Parses one node and drops fields that have default values. A default priority is kept if the
 * graph sets a priority of its own, because the node's value overrides it. */
function nodeOf(
  value: unknown,
  wires: Connection[],
  graph: Readonly<Record<string, unknown>>,
): GraphNode | null {
  if (!isRecord(value) || typeof value.id !== "string" || !KINDS.includes(String(value.type))) return null
  const kind = value.type as NodeKind
  const entries = Object.entries(value).filter(
    ([name, field]) =>
      field !== null &&
      field !== undefined &&
      (field !== own(USUAL[kind], name) || (name === "priority" && graph.priority)),
  )
  const node = Object.fromEntries(entries) as GraphNode
  if (kind === "input" && node.required === (node.default === undefined)) return without(node, "required")
  return kind === "workflow" ? withWires(node, wires) : node
}

/** Treats `{from: node.port}` in place of a property's value as a connection. */
function withWires(node: GraphNode, wires: Connection[]): GraphNode {
  const values = Object.entries(propertiesOf(node)).filter(([name, value]) => {
    const isWire = isRecord(value) && Object.keys(value).length === 1 && typeof value.from === "string"
    if (isWire) wires.push({ from: String(value.from), to: `${node.id}.${name}` })
    return !isWire
  })
  return values.length > 0 ? { ...node, properties: Object.fromEntries(values) } : without(node, "properties")
}

function without(node: GraphNode, field: string): GraphNode {
  return Object.fromEntries(Object.entries(node).filter(([name]) => name !== field)) as GraphNode
}

export function isSame(one: GraphDocument, other: GraphDocument): boolean {
  return JSON.stringify(sorted(one)) === JSON.stringify(sorted(other))
}

function sorted(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(sorted)
  if (!isRecord(value)) return value
  return Object.fromEntries(
    Object.keys(value)
      .sort()
      .map((name) => [name, sorted(value[name])]),
  )
}

/** Returns an unused id that is based on the preferred one: soften, soften_2, … */
export function freeId(document: GraphDocument, preferred: string): string {
  const base = preferred.replace(/[^A-Za-z0-9_-]+/g, "_").replace(/^[_-]+/, "") || "node"
  const ids = new Set(document.nodes.map((node) => node.id))
  if (!ids.has(base)) return base
  let number = 2
  while (ids.has(`${base}_${number}`)) number += 1
  return `${base}_${number}`
}

export function addNode(document: GraphDocument, node: GraphNode): GraphDocument {
  return { ...document, nodes: [...document.nodes, node] }
}

/** Sets a node's fields. Undefined removes a field. */
export function setFields(
  document: GraphDocument,
  id: string,
  fields: Record<string, unknown>,
): GraphDocument {
  const change = (node: GraphNode): GraphNode =>
    Object.fromEntries(
      Object.entries({ ...node, ...fields }).filter(([, value]) => value !== undefined),
    ) as GraphNode
  return { ...document, nodes: document.nodes.map((node) => (node.id === id ? change(node) : node)) }
}

export function setProperty(
  document: GraphDocument,
  id: string,
  name: string,
  value: unknown,
): GraphDocument {
  const node = document.nodes.find((node) => node.id === id)
  if (!node) return document
  const { [name]: _, ...rest } = propertiesOf(node)
  const values = value === undefined || value === "" ? rest : { ...rest, [name]: value }
  return setFields(document, id, { properties: Object.keys(values).length > 0 ? values : undefined })
}

/** Adds a connection, which replaces a value or another connection at its target. */
export function connect(document: GraphDocument, from: string, to: string): GraphDocument {
  const { node, port } = targetOf(to)
  const cleared = setProperty(document, node, port, undefined)
  const others = cleared.connections.filter((connection) => connection.to !== to)
  return { ...cleared, connections: [...others, { from, to }] }
}

export function disconnect(document: GraphDocument, to: string): GraphDocument {
  return { ...document, connections: document.connections.filter((connection) => connection.to !== to) }
}

/** Removes nodes with their connections, and individual connections that are given by their
 * targets. */
export function remove(
  document: GraphDocument,
  ids: ReadonlySet<string>,
  ends: ReadonlySet<string> = new Set(),
): GraphDocument {
  return {
    ...document,
    nodes: document.nodes.filter((node) => !ids.has(node.id)),
    connections: document.connections.filter(
      ({ from, to }) => !ends.has(to) && !ids.has(sourceOf(from).node) && !ids.has(targetOf(to).node),
    ),
  }
}

export const ID_PATTERN = /^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$/
