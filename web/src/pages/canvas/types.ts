/** The types of ports, as the control plane computes them: so that a wire that can't be is refused while it is drawn. */

import type { GraphPorts, OfferedProperty, WorkflowOffer } from "@/api/schema"
import { type GraphDocument, type GraphNode, own, sourceOf, targetOf } from "./document"
import { bodyOf, isByName, type NameReference, nameOf, namesIn, recordOf } from "./names"

/** A scalar by its name, a list by its item, an object by its fields; `any` fits everything. */
export interface PortType {
  readonly name: string
  readonly item?: PortType
  readonly fields?: Readonly<Record<string, PortType>>
}

export interface Port {
  readonly name: string
  readonly type: PortType
  /** Of an input: a run can't begin without it. */
  readonly isRequired?: boolean
}

export interface NodePorts {
  readonly inputs: readonly Port[]
  readonly outputs: readonly Port[]
}

const SCALARS = "text number integer boolean choice seed image video audio file".split(" ")
export const MEDIA: ReadonlySet<string> = new Set(["image", "video", "audio", "file"])
export const VALUE_TYPES = ["any", ...SCALARS, "image[]", "text[]", "number[]"] as const

export const ANY: PortType = { name: "any" }
const scalar = (name: string): PortType => ({ name })
const listOf = (item: PortType): PortType => ({ name: `${item.name}[]`, item })

const RESULT: PortType = {
  name: "result",
  fields: {
    images: listOf(scalar("image")),
    files: listOf(scalar("file")),
    width: scalar("integer"),
    height: scalar("integer"),
    text: scalar("text"),
    json: ANY,
    values: ANY,
    prompt_id: scalar("text"),
    execution_time: scalar("number"),
  },
}
const COLLECTED: PortType = {
  name: "collected",
  fields: { merged: listOf(ANY), count: scalar("integer") },
}
const PICTURES: PortType = { name: "pictures", fields: { images: listOf(scalar("image")) } }
const RESULTS: PortType = {
  name: "results",
  fields: {
    results: listOf(ANY),
    count: scalar("integer"),
    failed: scalar("integer"),
    images: listOf(scalar("image")),
  },
}
const RANKED: PortType = {
  name: "ranked",
  fields: {
    scored: listOf(ANY),
    best: listOf(ANY),
    images: listOf(scalar("image")),
    score: scalar("number"),
  },
}
const LIST: PortType = listOf(ANY)
/** By the names that the API gives them. */
const OBJECTS: Record<string, PortType> = {
  result: RESULT,
  collected: COLLECTED,
  pictures: PICTURES,
  results: RESULTS,
  ranked: RANKED,
}
const TAKES: Record<string, readonly string[]> = {
  number: ["integer", "seed"],
  integer: ["seed"],
  seed: ["integer"],
  text: ["choice"],
  choice: ["text", "integer", "number", "boolean"],
  file: ["image", "video", "audio"],
}

export function typeNamed(name: string): PortType {
  if (name.endsWith("[]")) return listOf(typeNamed(name.slice(0, -2)))
  return SCALARS.includes(name) ? scalar(name) : (own(OBJECTS, name) ?? ANY)
}

/** Of an input node: a table is a list of rows. */
function typeGiven(node: GraphNode): PortType {
  const columns = Object.entries(recordOf(node.columns))
  if (columns.length === 0) return typeNamed(String(node.value_type ?? "any"))
  const fields = Object.fromEntries(columns.map(([name, type]) => [name, typeNamed(String(type))]))
  return listOf({ name: "row", fields })
}

export function typeAt(given: PortType, path: readonly string[]): PortType | null {
  let found: PortType | null = given
  for (const segment of path) {
    if (!found) return null
    found = innerOf(found, segment)
  }
  return found
}

function innerOf(given: PortType, segment: string): PortType | null {
  if (given.name === ANY.name) return ANY
  if (given.item) {
    if (/^\d+$/.test(segment)) return given.item
    return segment === "count" ? scalar("integer") : null
  }
  return own(given.fields ?? {}, segment) ?? null
}

/** Whether a type fits a port. A whole result fits where one file is wanted: its first one is taken. */
export function fits(given: PortType, wanted: PortType): boolean {
  if (given.name === ANY.name || wanted.name === ANY.name || given.name === wanted.name) return true
  if (given.item && wanted.item) return fits(given.item, wanted.item)
  if (MEDIA.has(wanted.name) && given.fields)
    return (wanted.name === "image" ? "images" : "files") in given.fields
  return TAKES[wanted.name]?.includes(given.name) ?? false
}

function fitsItems(given: PortType): boolean {
  return given.name === ANY.name || Boolean(given.item) || "items" in (given.fields ?? {})
}

export type OfferOf = (node: GraphNode) => WorkflowOffer | undefined

export function offersOf(offers: readonly WorkflowOffer[]): OfferOf {
  const found = new Map(offers.map((each) => [`${each.kind}:${each.name}`, each]))
  return (node) =>
    found.get(
      typeof node.effect === "string" ? `effect:${node.effect}` : `workflow:${String(node.workflow ?? "")}`,
    )
}

/** The ports of a stored graph that a node names; undefined: they are not known, or not yet. */
export type InnerOf = (named: Readonly<Record<string, unknown>>) => GraphPorts | undefined
const NO_GRAPHS: InnerOf = () => undefined

export function propertyOf(offer: WorkflowOffer | undefined, name: string): OfferedProperty | undefined {
  return offer?.properties.find((each) => each.name === name)
}

/** All ports of all nodes, with their types. */
export class GraphTypes {
  private readonly document: GraphDocument
  private readonly offerOf: OfferOf
  private readonly innerOf: InnerOf
  private readonly nodes: Map<string, GraphNode>
  private readonly names: readonly NameReference[]
  /** The wires that end at a node, in their order. */
  private readonly arriving = new Map<string, { from: string; port: string }[]>()
  /** The nodes that a node reads by name. */
  private readonly read = new Map<string, string[]>()
  /** The ports at which it reads them. */
  private readonly reading = new Map<string, Set<string>>()
  private readonly leaving = new Map<string, Readonly<Record<string, PortType>>>()

  constructor(document: GraphDocument, offerOf: OfferOf, innerOf: InnerOf = NO_GRAPHS) {
    this.document = document
    this.offerOf = offerOf
    this.innerOf = innerOf
    this.nodes = new Map(document.nodes.map((each) => [each.id, each]))
    for (const { from, to } of document.connections) {
      const { node, port } = targetOf(to)
      const wires = this.arriving.get(node) ?? []
      wires.push({ from, port })
      this.arriving.set(node, wires)
    }
    this.names = namesIn(document)
    for (const { from, to } of this.names) {
      const { node, port } = targetOf(to)
      this.read.set(node, [...(this.read.get(node) ?? []), sourceOf(from).node])
      this.reading.set(node, (this.reading.get(node) ?? new Set<string>()).add(port))
    }
  }

  ports(node: GraphNode): NodePorts {
    const outputs = Object.entries(this.outputs(node.id)).map(([name, type]) => ({ name, type }))
    return { inputs: this.inputs(node), outputs }
  }

  /** Its own, and fields that read a name though nobody knows them, as of a workflow that is offered no more. */
  private inputs(node: GraphNode): Port[] {
    const own = this.ownInputs(node)
    const read = [...(this.reading.get(node.id) ?? [])]
    const others = read.filter((name) => !own.some((each) => each.name === name))
    return [...own, ...others.map((name) => ({ name, type: ANY }))]
  }

  private ownInputs(node: GraphNode): Port[] {
    const one = (name: string): Port[] => [{ name, type: ANY, isRequired: true }]
    if (node.type === "input") return []
    if (node.type === "output") return one("value")
    if (["condition", "switch", "approve"].includes(node.type)) return one("input")
    if (node.type === "fanout") return one(node.mode === "distribute" ? "items" : "input")
    if (node.type === "merge") return this.mergeInputs(node)
    if (isByName(node)) return this.namedInputs(node)
    const known = this.properties(node)
    const names = new Set(known.map((each) => each.name))
    const others = (this.arriving.get(node.id) ?? []).filter(({ port }) => !names.has(port))
    return [...known, ...others.map(({ port }) => ({ name: port, type: ANY }))]
  }

  private properties(node: GraphNode): Port[] {
    const offered = this.offerOf(node)?.properties ?? []
    return offered.map((each) => ({
      name: each.name,
      type: typeNamed(each.type),
      isRequired: each.required,
    }))
  }

  /** Ports at which a wire is written as a name. */
  private namedInputs(node: GraphNode): Port[] {
    const any = (name: string): Port => ({ name, type: ANY })
    if (node.type === "value") return valueNames(node).map(any)
    if (node.type === "graph") return this.graphInputs(node)
    const over: Port = { name: "over", type: LIST, isRequired: true }
    if (node.type === "score") {
      const picture = String(node.property ?? "image")
      const rest = this.properties(node).filter(({ name }) => name !== picture)
      return [over, ...(node.measure ? [] : rest)]
    }
    const inside = this.bodyInputs(bodyOf(node))
    if (node.type === "map") return [over, ...inside.filter(({ name }) => name !== over.name)]
    return [...Object.keys(recordOf(node.start)).map((name) => any(`start.${name}`)), ...inside]
  }

  private bodyInputs(body: Readonly<Record<string, unknown>>): Port[] {
    if ("nodes" in body) return [{ name: "do", type: ANY }]
    return "graph" in body ? this.graphInputs(body) : this.properties(workOf(body))
  }

  /** Those of the graph, and what is given besides. */
  private graphInputs(named: Readonly<Record<string, unknown>>): Port[] {
    const known = (this.innerOf(named)?.inputs ?? []).map((each) => ({
      name: each.name,
      type: typeNamed(each.type),
      isRequired: each.required,
    }))
    const others = Object.keys(recordOf(named.inputs)).filter(
      (name) => !known.some((each) => each.name === name),
    )
    return [...known, ...others.map((name) => ({ name, type: ANY }))]
  }

  /** Those that are taken, and a free one. */
  private mergeInputs(node: GraphNode): Port[] {
    const taken = (this.arriving.get(node.id) ?? []).map(({ port }) =>
      Number(/^input_(\d+)$/.exec(port)?.[1]),
    )
    const numbers = taken.filter((each) => Number.isInteger(each))
    let free = 0
    while (numbers.includes(free)) free += 1
    const all = [...new Set([...numbers, free])].sort((a, b) => a - b)
    return all.map((each) => ({
      name: `input_${each}`,
      type: ANY,
      isRequired: numbers.length === 0,
    }))
  }

  private outputs(id: string): Readonly<Record<string, PortType>> {
    const known = this.leaving.get(id)
    if (known) return known
    const node = this.nodes.get(id)
    if (!node) return {}
    this.leaving.set(id, {}) // in a cycle nothing is known
    const first = this.arriving.get(id)?.[0]
    const incoming = (first && this.at(first.from)) ?? ANY
    const found = { ...outputsOf(node, incoming), ...this.namedOutputs(node, incoming) }
    this.leaving.set(id, found)
    return found
  }

  /** Ports that the node's own settings name. */
  private namedOutputs(node: GraphNode, incoming: PortType): Record<string, PortType> {
    if (node.type === "switch")
      return Object.fromEntries([...caseNames(node), "default"].map((each) => [each, incoming]))
    if (node.type === "value") return { ...this.valueTypes(node), outputs: ANY }
    if (node.type === "loop") return { output: this.bodyType(bodyOf(node)) }
    return node.type === "graph" ? { ...this.graphOutputs(node), outputs: ANY } : {}
  }

  /** A value that is nothing but another node's has its type; with more beside it, it is a text. */
  private valueTypes(node: GraphNode): Record<string, PortType> {
    const names = this.names.filter((each) => each.isWhole)
    const typeOf = ([name, value]: [string, unknown]): [string, PortType] => {
      const whole = names.find((each) => each.to === `${node.id}.${name}`)
      if (whole) return [name, this.at(whole.from) ?? ANY]
      const isText = typeof value === "string" && !/^\s*\{\{[^{}]*\}\}\s*$/.test(value)
      return [name, isText ? scalar("text") : ANY]
    }
    return Object.fromEntries(Object.entries(recordOf(node.values)).map(typeOf))
  }

  private bodyType(body: Readonly<Record<string, unknown>>): PortType {
    if ("nodes" in body) return ANY
    return "graph" in body ? { name: "outputs", fields: this.graphOutputs(body) } : RESULT
  }

  /** A graph that is not known has the outputs that wires and names begin at. */
  private graphOutputs(named: Readonly<Record<string, unknown>>): Record<string, PortType> {
    const inner = this.innerOf(named)
    if (inner) return Object.fromEntries(inner.outputs.map(({ name, type }) => [name, typeNamed(type)]))
    const wires = [...this.document.connections, ...this.names].map((each) => sourceOf(each.from))
    const used = wires.filter((each) => each.node === named.id && each.port !== "outputs")
    return Object.fromEntries(used.map((each) => [each.port, ANY]))
  }

  /** The type at a source; null: there can't be a value. */
  at(from: string): PortType | null {
    const { node, port, path } = sourceOf(from)
    const type = own(this.outputs(node), port)
    return type ? typeAt(type, path) : null
  }

  /** Where a wire would begin so that it fits: the port itself, or what lies inside its value. null: refused. */
  wireFrom(from: string, to: string): string | null {
    const source = sourceOf(from)
    const target = targetOf(to)
    const node = this.nodes.get(target.node)
    const given = this.at(from)
    if (!node || !given || this.leads(target.node, source.node)) return null
    if (this.document.connections.some((each) => each.to === to)) return null
    const wanted = this.inputs(node).find((each) => each.name === target.port)?.type
    if (!wanted) return null
    if (target.port === "do" && isByName(node)) return null
    const isList = node.type === "fanout" ? node.mode === "distribute" : target.port === "over"
    if (isList && node.type !== "workflow") return itemsOf(given, from)
    if (fits(given, wanted)) return from
    for (const path of pathsInside(given)) {
      const inner = typeAt(given, path)
      if (inner && fits(inner, wanted)) return [from, ...path].join(".")
    }
    return null
  }

  /** Everything that could be wired to a port. */
  sourcesFor(to: string): string[] {
    const free = new GraphTypes(
      { ...this.document, connections: this.document.connections.filter((each) => each.to !== to) },
      this.offerOf,
      this.innerOf,
    )
    const found: string[] = []
    for (const node of this.document.nodes)
      for (const port of free.ports(node).outputs) {
        const from = `${node.id}.${port.name}`
        const wire = free.wireFrom(from, to)
        if (wire) found.push(wire)
        if (wire === from) found.push(...free.insides(from, port.type, to))
      }
    return [...new Set(found)]
  }

  /** Everything that a node may read by name: ports, and what is inside their values. */
  namesFor(id: string): string[] {
    const free = this.document.nodes.filter((each) => each.id !== id && !this.leads(id, each.id))
    const names = free.flatMap((node) =>
      Object.entries(this.outputs(node.id)).flatMap(([port, type]) => [
        `${node.id}.${port}`,
        ...partsOf(type).map((part) => `${node.id}.${port}.${part}`),
      ]),
    )
    return names.map((each) => nameOf(this.document, each))
  }

  /** What a node that decides is given: names of fields that a condition may read. */
  fieldsGiven(node: GraphNode): string[] {
    const first = this.arriving.get(node.id)?.[0]
    const maker = first && this.nodes.get(sourceOf(first.from).node)
    if (maker?.type === "value" && first?.from === `${maker.id}.outputs`) return valueNames(maker)
    const type = (first && this.at(first.from)) ?? RESULT
    return type.name === ANY.name ? [] : partsOf(type)
  }

  /** What is in one item of the list that a node takes. */
  fieldsOfItem(node: GraphNode): string[] {
    const over = this.names.find((each) => each.to === `${node.id}.over`)
    return partsOf((over && this.at(over.from)?.item) ?? ANY)
  }

  itemIs(node: GraphNode, wanted: string): boolean {
    const over = this.names.find((each) => each.to === `${node.id}.over`)
    const item = over && this.at(over.from)?.item
    return Boolean(item && fits(item, typeNamed(wanted)))
  }

  /** What one time of a body gives. */
  fieldsOfBody(node: GraphNode): string[] {
    return partsOf(this.bodyType(bodyOf(node)))
  }

  /** Parts of a value that fit as well: `draw.output.width` where anything does. */
  private insides(from: string, type: PortType, to: string): string[] {
    const all = Object.keys(type.fields ?? {}).map((name) => `${from}.${name}`)
    return all.filter((each) => this.wireFrom(each, to) === each)
  }

  /** Whether one can get from one node to another: a wire back would be a cycle. */
  private leads(from: string, to: string): boolean {
    const seen = new Set<string>()
    const waiting = [to]
    for (let node = waiting.pop(); node !== undefined; node = waiting.pop()) {
      if (node === from) return true
      if (seen.has(node)) continue
      seen.add(node)
      for (const each of this.arriving.get(node) ?? []) waiting.push(sourceOf(each.from).node)
      waiting.push(...(this.read.get(node) ?? []))
    }
    return false
  }
}

/** What a body runs, as a node that runs it has it. */
function workOf(body: Readonly<Record<string, unknown>>): GraphNode {
  return { ...body, id: "do", type: "workflow" }
}

function caseNames(node: GraphNode): string[] {
  const cases = Array.isArray(node.cases) ? (node.cases as unknown[]) : []
  return cases.flatMap((each) =>
    typeof each === "object" && each !== null && "name" in each ? [String(each.name)] : [],
  )
}

function valueNames(node: GraphNode): string[] {
  return Object.keys(recordOf(node.values))
}

function itemsOf(given: PortType, from: string): string | null {
  if (fitsItems(given)) return from
  for (const name of ["images", "merged"]) if (given.fields?.[name]) return `${from}.${name}`
  return null
}

/** Parts of a value that people read. */
function partsOf(type: PortType): string[] {
  if (type.item) return [...(type.item.fields ? [] : ["0"]), "count"]
  const names = Object.keys(type.fields ?? {}).filter((each) => !INTERNAL.has(each))
  return names.flatMap((each) => (each === "images" ? ["images", "images.0", "images.count"] : [each]))
}

const INTERNAL: ReadonlySet<string> = new Set(["prompt_id", "execution_time", "files"])

/** In the order in which they are tried. */
function pathsInside(given: PortType): string[][] {
  if (given.item) return [["0"], ["count"]]
  const names = Object.keys(given.fields ?? {})
  const scalars = names.filter((each) => given.fields?.[each]?.name !== ANY.name)
  const open = names.filter((each) => !scalars.includes(each))
  return [...scalars, ...open].filter((each) => !HIDDEN.has(each)).map((each) => [each])
}

/** Nobody means these when a whole result is wired to a text or a number. */
const HIDDEN: ReadonlySet<string> = new Set(["prompt_id", "execution_time", "width", "height"])

function outputsOf(node: GraphNode, incoming: PortType): Readonly<Record<string, PortType>> {
  if (node.type === "output") return {}
  if (node.type === "input") return { value: typeGiven(node) }
  if (node.type === "condition") return { true: incoming, false: incoming }
  if (node.type === "merge") return { output: node.mode === "concat_images" ? PICTURES : COLLECTED }
  if (node.type === "workflow") return { output: RESULT }
  if (node.type === "approve") return { approved: node.pick ? ANY : incoming, rejected: incoming }
  if (node.type === "map") return { output: RESULTS }
  if (node.type === "score") return { output: RANKED }
  if (node.type === "loop")
    return { output: ANY, rounds: scalar("integer"), done: scalar("boolean"), score: ANY }
  if (node.type !== "fanout") return {}
  const items = incoming.fields?.items ?? incoming
  if (node.mode === "distribute" && node.per_item) return { item: items.item ?? ANY }
  const given = node.mode === "distribute" ? { name: "chunk", fields: { items } } : incoming
  const count = Number(node.output_count ?? 2)
  const names = Array.from({ length: Math.max(1, Math.min(100, count)) }, (_, at) => `output_${at}`)
  return Object.fromEntries(names.map((name) => [name, given]))
}
