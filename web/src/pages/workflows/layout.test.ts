import { expect, test } from "vitest"
import type { Drawing, DrawnNode, SuggestedProperty } from "@/api/schema"
import { cut, firstView, HEAD, LINE, layOut, showing, topNode, wholeView, zoomed } from "./layout"

function node(id: string, fields: Partial<DrawnNode> = {}): DrawnNode {
  return {
    id,
    type: "Node",
    title: `Node ${id}`,
    is_subgraph: false,
    x: 0,
    y: 0,
    width: 240,
    height: 80,
    mode: "always",
    inputs: [],
    outputs: [],
    ...fields,
  }
}

function input(binding: string, name: string, value: unknown = 1): SuggestedProperty {
  const node_id = binding.slice(0, binding.indexOf("."))
  return {
    name,
    type: "integer",
    binding,
    node_id,
    node_title: "Node",
    path: [],
    input: binding.slice(binding.indexOf(".") + 1),
    value,
    default: value,
    minimum: null,
    maximum: null,
    step: null,
    choices: null,
    is_multiline: false,
    role: null,
  }
}

const drawing = (nodes: DrawnNode[], links: Drawing["links"] = []): Drawing => ({ nodes, links, groups: [] })

test("an input that can be connected and typed is drawn only once, as a row", () => {
  const slots = [
    { name: "image", type: "IMAGE" },
    { name: "size", type: "INT" },
  ]
  const { boxes } = layOut(drawing([node("1", { inputs: slots })]), [input("1.size", "size")])
  const [box] = boxes
  expect(box?.inputs.map((slot) => slot.name)).toEqual(["image"])
  expect(box?.rows.map((row) => row.name)).toEqual(["size"])
  expect(box?.ins[1]).toBe(box?.rows[0]?.y)
  expect(box?.height).toBeGreaterThanOrEqual(HEAD + 2 * LINE)
})

test("inputs of inner nodes are drawn on the node that contains them", () => {
  const inner = input("2:20.radius", "radius")
  expect(topNode(inner)).toBe("2")
  const slots = [{ name: "radius", type: "INT" }]
  const { boxes } = layOut(drawing([node("2", { is_subgraph: true, inputs: slots })]), [inner])
  expect(boxes[0]?.rows).toHaveLength(1)
  expect(boxes[0]?.inputs).toHaveLength(0)
})

test("overlapping nodes are moved apart", () => {
  const { boxes } = layOut(drawing([node("1"), node("2"), node("3", { x: 500 })]), [])
  const [one, two, three] = ["1", "2", "3"].map((id) => boxes.find((box) => box.node.id === id))
  expect(two?.y).toBeGreaterThanOrEqual((one?.y ?? 0) + (one?.height ?? 0))
  expect(three?.y).toBe(one?.y)
})

test("a connection goes from its output to its input, and is left out if a node is missing", () => {
  const link = (from_node: string, to_node: string) => ({
    from_node,
    from_slot: 0,
    to_node,
    to_slot: 0,
    type: "",
  })
  const from = node("1", { outputs: [{ name: "IMAGE", type: "IMAGE" }] })
  const to = node("2", { x: 400, inputs: [{ name: "images", type: "IMAGE" }] })
  const { wires, area } = layOut(drawing([from, to], [link("1", "2"), link("1", "9")]), [])
  expect(wires).toHaveLength(1)
  expect(wires[0]?.path.startsWith("M240 ")).toBe(true)
  expect(wires[0]?.path).toMatch(/ 400 [\d.-]+$/)
  expect(area.width).toBeGreaterThan(640)
})

test("if a node has many inputs, the rest is counted instead of drawn", () => {
  const many = Array.from({ length: 20 }, (_, place) => input(`1.i${place}`, `i${place}`))
  const { boxes } = layOut(drawing([node("1")]), many)
  expect(boxes[0]?.rows).toHaveLength(12)
  expect(boxes[0]?.hidden).toBe(8)
})

test("zooming keeps the point under the pointer, and is limited", () => {
  const all = { x: 0, y: 0, width: 1000, height: 500 }
  const near = zoomed(all, all, 2, { x: 250, y: 250 })
  expect(near).toEqual({ x: 125, y: 125, width: 500, height: 250 })
  expect(zoomed(all, all, 1e9, { x: 0, y: 0 }).width).toBe(240)
  expect(zoomed(all, all, 1e-9, { x: 0, y: 0 }).width).toBe(1500)
})

test("long values are truncated, and lines are joined", () => {
  expect(cut("a\n b", 10)).toBe("a b")
  expect(cut("abcdefgh", 5)).toBe("abcd…")
})

test("a long workflow starts at its left edge, and a short one is centered at its own size", () => {
  const room = { width: 800, height: 400 }
  const long = { x: 10, y: 0, width: 5000, height: 200 }
  expect(firstView(long, room)).toEqual({ x: 10, y: -180, width: 1120, height: 560 })
  expect(wholeView(long, room)).toMatchObject({ x: 10, width: 5000 })
  const short = { x: 0, y: 0, width: 240, height: 120 }
  expect(firstView(short, room)).toEqual({ x: -200, y: -100, width: 640, height: 320 })
})

test("a node outside the view is centered", () => {
  const view = { x: 0, y: 0, width: 400, height: 200 }
  expect(showing(view, { x: 10, y: 10, width: 100, height: 50 })).toBe(view)
  expect(showing(view, { x: 900, y: 90, width: 100, height: 20 })).toEqual({ ...view, x: 750, y: 0 })
})
