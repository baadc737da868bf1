/** Finds and writes the names that nodes use to read values: in templates, in `over` and in
 * `{from: …}`. Pure functions. */

import {
  connect,
  type GraphDocument,
  type GraphNode,
  isRecord,
  own,
  propertiesOf,
  setFields,
  setProperty,
  targetOf,
} from "./document"

/** A dependency that is written as a name instead of a connection. */
export interface NameReference {
  /** The source: node.port, or a path inside that port's value. */
  readonly from: string
  /** The target: node.port, where the port is the field that contains the name. */
  readonly to: string
  /** True if the field contains nothing but this name, so that removing the name empties the
   * field. */
  readonly isWhole: boolean
}

type Values = Readonly<Record<string, unknown>>

/** A field of a node that may contain names. */
interface Slot {
  readonly port: string
  readonly value: unknown
  /** Names that are defined inside the node. */
  readonly inner: ReadonlySet<string>
  /** True if the value is a plain path without braces. */
  readonly isPath?: boolean
}

const NOTHING: ReadonlySet<string> = new Set()
const OF_ITEMS: ReadonlySet<string> = new Set(["item", "index"])
const OF_ROUNDS: ReadonlySet<string> = new Set(["previous", "round"])
const KEYWORDS: ReadonlySet<string> = new Set("and or not contains in true false null".split(" "))
const BRACES = /\{\{((?:[^"'}]|\}(?!\})|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*)\}\}/g
const TOKEN =
  /"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])|([A-Za-z_]\w*(?:-\w+)*(?:\.\w+(?:-\w+)*)*)(\s*\()?|[^\s"'\w]/g
const START = "start."

export function recordOf(value: unknown): Values {
  return isRecord(value) ? value : {}
}

/** Returns the work that a map, a loop or a judge runs. */
export function bodyOf(node: GraphNode): Values {
  return recordOf(node.do)
}

/** Checks whether connections to this node's ports are written as names. */
export function isByName(node: GraphNode): boolean {
  return ["value", "map", "loop", "graph", "score"].includes(node.type)
}

function ofRecord(values: unknown, inner: ReadonlySet<string>, prefix = ""): Slot[] {
  return Object.entries(recordOf(values)).map(([name, value]) => ({ port: prefix + name, value, inner }))
}

function slotsOf(node: GraphNode): Slot[] {
  if (node.type === "workflow") return ofRecord(node.properties, NOTHING)
  if (node.type === "value") return ofRecord(node.values, NOTHING)
  if (node.type === "graph") return ofRecord(node.inputs, NOTHING)
  const over: Slot[] = [{ port: "over", value: node.over, inner: NOTHING, isPath: true }]
  if (node.type === "score") return [...over, ...ofRecord(node.properties, OF_ITEMS)]
  if (node.type === "map") return [...over, ...ofBody(bodyOf(node), OF_ITEMS)]
  if (node.type !== "loop") return []
  return [...ofRecord(node.start, NOTHING, START), ...ofBody(bodyOf(node), OF_ROUNDS)]
}

/** Inner nodes read their values through one port of the outer node, called `do`. */
function ofBody(body: Values, words: ReadonlySet<string>): Slot[] {
  if (!Array.isArray(body.nodes)) return ofRecord("graph" in body ? body.inputs : body.properties, words)
  const nodes = body.nodes.filter(isRecord) as GraphNode[]
  const inner = new Set([...words, ...nodes.map((node) => node.id)])
  const inside = nodes.flatMap(slotsOf).map((slot) => ({
    ...slot,
    port: "do",
    inner: new Set([...inner, ...slot.inner]),
  }))
  const wires = Array.isArray(body.connections) ? body.connections : []
  return [
    ...inside,
    ...wires.map((wire) => ({ port: "do", value: recordOf(wire).from, inner, isPath: true })),
  ]
}

/** Returns the paths that occur in an expression, such as `input.photo`. */
export function pathsIn(expression: string): string[] {
  const paths: string[] = []
  let before = ""
  for (const [token, name, call] of expression.matchAll(TOKEN)) {
    if (name && !call && before !== "|" && !KEYWORDS.has(name.toLowerCase())) paths.push(name)
    before = token
  }
  return paths
}

function textsIn(value: unknown): string[] {
  if (typeof value === "string") return [value]
  if (Array.isArray(value)) return value.flatMap(textsIn)
  if (!isRecord(value)) return []
  if (isSource(value)) return [`{{ ${value.from} }}`]
  return Object.values(value).flatMap(textsIn)
}

function isSource(value: Values): value is { from: string } {
  return Object.keys(value).length === 1 && typeof value.from === "string"
}

function expressionsIn({ value, isPath }: Slot): string[] {
  if (isPath) return typeof value === "string" ? [value] : []
  return textsIn(value).flatMap((text) => [...text.matchAll(BRACES)].map((match) => match[1] ?? ""))
}

/** Returns all references by name from one node to another, without duplicates. */
export function namesIn({ nodes }: Pick<GraphDocument, "nodes">): NameReference[] {
  const nodesById = new Map(nodes.map((node) => [node.id, node]))
  const references = new Map<string, NameReference>()
  for (const node of nodes)
    for (const slot of slotsOf(node)) {
      const expressions = expressionsIn(slot)
      for (const path of expressions.flatMap(pathsIn)) {
        const from = sourceNamed(path, nodesById, slot.inner)
        const to = `${node.id}.${slot.port}`
        if (from) references.set(`${from} ${to}`, { from, to, isWhole: isWhole(slot, path) })
      }
    }
  return [...references.values()]
}

function isWhole({ value, isPath }: Slot, path: string): boolean {
  if (isPath) return value === path
  if (isRecord(value)) return isSource(value)
  return typeof value === "string" && value.replace(/\s/g, "") === `{{${path}}}`
}

/** Returns the port where a path starts: `{{ photo }}` starts at photo.value. Returns null if
 * the path doesn't start at another node. */
function sourceNamed(
  path: string,
  nodesById: ReadonlyMap<string, GraphNode>,
  inner: ReadonlySet<string>,
): string | null {
  const [root = "", ...rest] = path.replace(/\.exists$/, "").split(".")
  if (inner.has(root)) return null
  const node = nodesById.get(root)
  if (node?.type === "input")
    return [root, "value", ...(rest[0] === "value" ? rest.slice(1) : rest)].join(".")
  if (node) return [root, ...(rest.length > 0 ? rest : ["output"])].join(".")
  const [name = "", ...deeper] = rest
  return root === "input" && nodesById.get(name)?.type === "input"
    ? [name, "value", ...deeper].join(".")
    : null
}

/** Returns a source as users write it. The value of an input node is written as
 * `input.photo`, for example. */
export function nameOf(document: GraphDocument, from: string): string {
  const [id = "", port, ...path] = from.split(".")
  const isInput = document.nodes.find((node) => node.id === id)?.type === "input" && port === "value"
  return isInput ? ["input", id, ...path].join(".") : from
}

/** Returns the value of a node's field. */
export function valueAt(node: GraphNode, port: string): unknown {
  if (port === "over" && isByName(node)) return node.over
  if (port.startsWith(START)) return own(recordOf(node.start), port.slice(START.length))
  return own(recordAt(node), port)
}

function recordAt(node: GraphNode): Values {
  if (node.type === "value") return recordOf(node.values)
  if (node.type === "graph") return recordOf(node.inputs)
  if (node.type !== "map" && node.type !== "loop") return propertiesOf(node)
  const body = bodyOf(node)
  return recordOf("graph" in body ? body.inputs : body.properties)
}

/** Sets a node's field. Undefined clears the field. */
export function setAt(document: GraphDocument, id: string, port: string, value: unknown): GraphDocument {
  const node = document.nodes.find((node) => node.id === id)
  if (!node) return document
  const put = (record: unknown, name: string) => withValue(recordOf(record), name, value)
  if (port === "over" && isByName(node)) return setFields(document, id, { over: value ?? "" })
  if (port.startsWith(START))
    return setFields(document, id, { start: put(node.start, port.slice(START.length)) })
  // A cleared value of a value node keeps its name and becomes an empty text.
  if (node.type === "value")
    return setFields(document, id, { values: { ...recordOf(node.values), [port]: value ?? "" } })
  if (node.type === "graph") return setFields(document, id, { inputs: put(node.inputs, port) })
  if (node.type !== "map" && node.type !== "loop") return setProperty(document, id, port, value)
  const body = bodyOf(node)
  const field = "graph" in body ? "inputs" : "properties"
  const { [field]: _, ...rest } = body
  const changed = put(body[field], port)
  return setFields(document, id, { do: changed ? { ...rest, [field]: changed } : rest })
}

function withValue(record: Values, name: string, value: unknown): Values | undefined {
  const { [name]: _, ...rest } = record
  if (value !== undefined) return { ...record, [name]: value }
  return Object.keys(rest).length > 0 ? rest : undefined
}

/** Connects a source to a port: with a connection, or by writing the source's name into the field
 * if the node reads its values by name. */
export function withConnection(document: GraphDocument, from: string, to: string): GraphDocument {
  const { node: id, port } = targetOf(to)
  const node = document.nodes.find((node) => node.id === id)
  if (!node || !isByName(node)) return connect(document, from, to)
  const name = nameOf(document, from)
  if (port === "over") return setFields(document, id, { over: name })
  return setAt(document, id, port, withName(valueAt(node, port), name))
}

/** Adds a name to a text. If the text consists only of another name, that name is replaced. */
export function withName(value: unknown, name: string): string {
  const template = `{{ ${name} }}`
  if (typeof value !== "string" || value.trim() === "") return template
  const isOnly = /^\s*\{\{[^{}]*\}\}\s*$/.test(value)
  return isOnly ? template : `${value}${value.endsWith(" ") ? "" : " "}${template}`
}

/** Removes connections that are written as names by clearing their fields. */
export function withoutReferences(document: GraphDocument, ends: readonly NameReference[]): GraphDocument {
  return ends.reduce((changed, { to }) => {
    const { node, port } = targetOf(to)
    return setAt(changed, node, port, undefined)
  }, document)
}

const RENAMED = ["properties", "values", "inputs", "start", "do"] as const

/** Returns the node with references to renamed nodes updated in all of its fields. */
export function withNames(node: GraphNode, names: ReadonlyMap<string, string>): GraphNode {
  const fields = RENAMED.filter((field) => node[field] !== undefined)
  const changed = fields.map((field) => [field, renamedIn(node[field], names)])
  const over = typeof node.over === "string" && { over: renamedText(node.over, names) }
  return { ...node, ...Object.fromEntries(changed), ...over }
}

function renamedIn(value: unknown, names: ReadonlyMap<string, string>): unknown {
  if (typeof value === "string")
    return value.replace(BRACES, (whole) => `{{${renamedText(whole.slice(2, -2), names)}}}`)
  if (Array.isArray(value)) return value.map((item) => renamedIn(item, names))
  if (!isRecord(value)) return value
  const inner = Array.isArray(value.nodes) ? value.nodes.map((node) => String(recordOf(node).id)) : []
  const rest = new Map([...names].filter(([before]) => !inner.includes(before)))
  const isPath = (name: string) => name === "from" || (name === "over" && typeof value.type === "string")
  return Object.fromEntries(
    Object.entries(value).map(([name, field]) => [
      name,
      isPath(name) && typeof field === "string" ? renamedText(field, rest) : renamedIn(field, rest),
    ]),
  )
}

function renamedText(expression: string, names: ReadonlyMap<string, string>): string {
  let before = ""
  return expression.replace(TOKEN, (token: string, name?: string, call?: string) => {
    const isName = name && !call && before !== "|"
    before = token
    if (!isName) return token
    const parts = name.split(".")
    const at = parts[0] === "input" && parts.length > 1 && !names.has("input") ? 1 : 0
    parts[at] = names.get(parts[at] ?? "") ?? parts[at] ?? ""
    return parts.join(".")
  })
}
