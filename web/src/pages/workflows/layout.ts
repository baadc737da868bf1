/** Calculates the positions of a drawn workflow's nodes, exposable inputs and connections. Pure
 * functions. */

import type { Drawing, DrawnNode, DrawnSlot, SuggestedProperty } from "@/api/schema"

export const HEAD = 30
export const LINE = 22
const PAD = 8
const WIDTH_MIN = 190
const WIDTH_MAX = 420
const GAP = 24
/** The maximum number of input rows per node. The list beside the drawing contains all of them. */
const ROWS_MAX = 12
/** With more nodes than this, nodes keep their saved positions, even if some overlap. */
const APART_MAX = 800
const CHARACTER = 6.6

/** An input that can be exposed. */
export interface InputRow {
  y: number
  property: SuggestedProperty
  name: string
  value: string
}

export interface Slot {
  y: number
  name: string
}

export interface Box {
  node: DrawnNode
  x: number
  y: number
  width: number
  height: number
  inputs: readonly Slot[]
  outputs: readonly Slot[]
  rows: readonly InputRow[]
  /** The number of exposable inputs without a row. */
  hidden: number
  /** The vertical position of each input slot, by slot number. */
  ins: readonly number[]
}

export interface Wire {
  key: string
  from: string
  to: string
  path: string
}

export interface Area {
  x: number
  y: number
  width: number
  height: number
}

export interface Laid {
  boxes: readonly Box[]
  wires: readonly Wire[]
  area: Area
}

/** Returns the id of the top-level node that contains an input. The ids of inner nodes start
 * with it. */
export function topNode(property: SuggestedProperty): string {
  return property.node_id.split(":")[0] ?? property.node_id
}

export function layOut(drawing: Drawing, properties: readonly SuggestedProperty[]): Laid {
  const of = new Map<string, SuggestedProperty[]>()
  for (const property of properties) {
    const name = topNode(property)
    of.set(name, [...(of.get(name) ?? []), property])
  }
  const boxes = apart(drawing.nodes.map((node) => boxOf(node, of.get(node.id) ?? [])))
  const byId = new Map(boxes.map((box) => [box.node.id, box]))
  return { boxes, wires: wiresOf(drawing, byId), area: areaOf([...boxes, ...drawing.groups]) }
}

function boxOf(node: DrawnNode, properties: readonly SuggestedProperty[]): Box {
  const width = Math.max(WIDTH_MIN, Math.min(WIDTH_MAX, node.width))
  const shown = properties.slice(0, ROWS_MAX)
  const rowOfSlot = node.inputs.map((slot) => shown.findIndex((property) => isOf(property, slot, node)))
  const plain = node.inputs.filter((_, place) => (rowOfSlot[place] ?? -1) < 0)
  const lineY = (line: number) => HEAD + 4 + (line + 0.5) * LINE
  const slotLines = Math.max(plain.length, node.outputs.length)
  let free = 0
  const ins = rowOfSlot.map((row) => {
    if (row >= 0) return lineY(slotLines + row)
    free += 1
    return lineY(free - 1)
  })
  return {
    node,
    x: node.x,
    y: node.y - HEAD,
    width,
    height: HEAD + PAD + (slotLines + shown.length + (properties.length > shown.length ? 1 : 0)) * LINE,
    inputs: plain.map(({ name }, line) => ({ name, y: lineY(line) })),
    outputs: node.outputs.map(({ name }, line) => ({ name, y: lineY(line) })),
    rows: shown.map((property, row) => rowOf(property, lineY(slotLines + row), width)),
    hidden: properties.length - shown.length,
    ins,
  }
}

/** Checks whether an input belongs to a slot. As in ComfyUI's editors, an input that can be either
 * connected or typed is drawn only once. */
function isOf(property: SuggestedProperty, slot: DrawnSlot, node: DrawnNode): boolean {
  if (property.node_id === node.id) return property.input === slot.name
  return node.is_subgraph && (property.input === slot.name || property.name === slot.name)
}

function rowOf(property: SuggestedProperty, y: number, width: number): InputRow {
  const room = Math.floor((width - 52) / CHARACTER)
  const name = cut(property.input, Math.ceil(room * 0.62))
  return { y, property, name, value: cut(valueText(property.value), Math.max(4, room - name.length - 1)) }
}

export function valueText(value: unknown): string {
  return typeof value === "string" ? value : value === undefined ? "" : (JSON.stringify(value) ?? "")
}

export function cut(text: string, most: number): string {
  const line = text.replace(/\s+/g, " ")
  return line.length > most ? `${line.slice(0, Math.max(1, most - 1))}…` : line
}

/** Moves boxes down so that they don't overlap. Their heights differ from the heights in
 * ComfyUI's editor. */
function apart(boxes: readonly Box[]): Box[] {
  if (boxes.length > APART_MAX) return [...boxes]
  const placed: Box[] = []
  for (const box of [...boxes].sort((a, b) => a.y - b.y || a.x - b.x)) {
    let y = box.y
    for (let moved = true; moved; ) {
      const below = placed
        .filter((other) => isOver({ ...box, y }, other))
        .map((other) => other.y + other.height)
      moved = below.length > 0
      if (moved) y = Math.max(...below) + GAP
    }
    placed.push({ ...box, y })
  }
  return placed
}

function isOver(one: Area, other: Area): boolean {
  return (
    one.x < other.x + other.width &&
    other.x < one.x + one.width &&
    one.y < other.y + other.height &&
    other.y < one.y + one.height
  )
}

function wiresOf(drawing: Drawing, boxes: ReadonlyMap<string, Box>): Wire[] {
  return drawing.links.flatMap((link) => {
    const from = boxes.get(link.from_node)
    const to = boxes.get(link.to_node)
    if (!from || !to) return []
    const x1 = from.x + from.width
    const y1 = from.y + (from.outputs[link.from_slot]?.y ?? HEAD / 2)
    const x2 = to.x
    const y2 = to.y + (to.ins[link.to_slot] ?? HEAD / 2)
    const bend = Math.max(30, Math.min(160, Math.abs(x2 - x1) / 2))
    const key = `${link.from_node}.${link.from_slot} ${link.to_node}.${link.to_slot}`
    const path = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`
    return [{ key, from: link.from_node, to: link.to_node, path }]
  })
}

const MARGIN = 24
const NOTHING: Area = { x: 0, y: 0, width: 400, height: 240 }

function areaOf(parts: readonly Area[]): Area {
  if (parts.length === 0) return NOTHING
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity]
  for (const part of parts) {
    left = Math.min(left, part.x)
    top = Math.min(top, part.y)
    right = Math.max(right, part.x + part.width)
    bottom = Math.max(bottom, part.y + part.height)
  }
  return {
    x: left - MARGIN,
    y: top - MARGIN,
    width: right - left + 2 * MARGIN,
    height: bottom - top + 2 * MARGIN,
  }
}

/** The range of drawing units per pixel within which labels are readable. */
const UNIT_MIN = 0.8
const UNIT_MAX = 1.4

export interface Room {
  width: number
  height: number
}

/** Returns a view of the whole drawing, enlarged no further than the limit. */
export function wholeView(all: Area, room: Room): Area {
  return viewAt(all, room, Math.max(UNIT_MIN, all.width / room.width, all.height / room.height))
}

/** Returns a view of the whole drawing if its labels are readable, else of its top-left part. */
export function firstView(all: Area, room: Room): Area {
  const whole = Math.max(all.width / room.width, all.height / room.height)
  return viewAt(all, room, Math.max(UNIT_MIN, Math.min(UNIT_MAX, whole)))
}

/** Centers the view on a node unless the node is already visible. */
export function showing(view: Area, box: Area): Area {
  const isSeen =
    box.x >= view.x &&
    box.y >= view.y &&
    box.x + box.width <= view.x + view.width &&
    box.y + box.height <= view.y + view.height
  if (isSeen) return view
  return {
    ...view,
    x: box.x + box.width / 2 - view.width / 2,
    y: box.y + box.height / 2 - view.height / 2,
  }
}

/** Centers the drawing if it fits, otherwise starts at its left and top edges. */
function viewAt(all: Area, room: Room, unit: number): Area {
  const width = room.width * unit
  const height = room.height * unit
  return {
    x: all.x + Math.min(0, (all.width - width) / 2),
    y: all.y + Math.min(0, (all.height - height) / 2),
    width,
    height,
  }
}

/** The smallest visible width, in drawing units: about one node. */
const SEEN_MIN = 240

/** Zooms around a fixed point, within the limits for the largest and the smallest view. */
export function zoomed(view: Area, all: Area, factor: number, at: { x: number; y: number }): Area {
  const most = 1.5 * Math.max(all.width, (all.height * view.width) / view.height)
  const width = Math.max(SEEN_MIN, Math.min(most, view.width / factor))
  const scale = width / view.width
  return {
    x: at.x - (at.x - view.x) * scale,
    y: at.y - (at.y - view.y) * scale,
    width,
    height: view.height * scale,
  }
}
