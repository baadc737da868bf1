import { describe, expect, it } from "vitest"
import type { GraphPorts, OfferedProperty, WorkflowOffer } from "@/api/schema"
import { clipOf, paste, rename } from "./copy"
import type { GraphDocument, GraphNode } from "./document"
import { portOf } from "./facts"
import { placesFor } from "./layout"
import { namesIn, pathsIn, withConnection, withoutReferences } from "./names"
import { GraphTypes, offersOf } from "./types"

const IMAGE = { name: "image", type: "image", required: true } as unknown as OfferedProperty
const SIZE = { name: "size", type: "integer", required: false } as unknown as OfferedProperty
const SHARPEN = { kind: "workflow", name: "sharpen", properties: [IMAGE, SIZE] } as unknown as WorkflowOffer
const OFFERS = offersOf([SHARPEN])
const FRAME: GraphPorts = {
  inputs: [
    { name: "picture", type: "image", required: true },
    { name: "title", type: "text", required: false },
  ],
  outputs: [{ name: "framed", type: "result", required: false }],
}
const inner = (named: Readonly<Record<string, unknown>>) => (named.graph === "Frame" ? FRAME : undefined)

function graph(...nodes: Record<string, unknown>[]): GraphDocument {
  return { name: "g", nodes: nodes as unknown as GraphNode[], connections: [] }
}

const PHOTO = { id: "photo", type: "input", value_type: "image" }
const ROWS = { id: "rows", type: "input", columns: { caption: "text", photo: "image" } }
const DRAW = { id: "draw", type: "workflow", workflow: "draw" }

function ends(document: GraphDocument): string[] {
  return namesIn(document).map(({ from, to }) => `${from} > ${to}`)
}

describe("names", () => {
  it("are neither keywords, nor functions, nor text literals", () => {
    expect(pathsIn("NOT a.b > 0.5e3 AND max(c-d, 1) | default('e.f') in [g, true]")).toEqual([
      "a.b",
      "c-d",
      "g",
    ])
  })

  it("are found in every field that may contain a template", () => {
    const document = graph(
      PHOTO,
      ROWS,
      DRAW,
      { id: "soften", type: "workflow", workflow: "soften", properties: { deep: ["a {{ photo }}"] } },
      { id: "title", type: "value", values: { text: "{{ draw.output.text | trim }} of {{ input.photo }}" } },
      {
        id: "each",
        type: "map",
        over: "input.rows",
        do: { workflow: "x", properties: { image: "{{ item.photo }}" } },
      },
      {
        id: "again",
        type: "loop",
        start: { p: { from: "draw.output" } },
        do: {
          graph: "Frame",
          version: 1,
          inputs: { picture: "{{ previous.p }}", title: "{{ title.text }}" },
        },
      },
      { id: "best", type: "score", over: "each.output.images", properties: { reference: "{{ photo }}" } },
      {
        id: "framed",
        type: "graph",
        graph: "Frame",
        version: 1,
        inputs: { picture: "{{ best.output.images.0 }}" },
      },
    )
    expect(ends(document)).toEqual([
      "photo.value > soften.deep",
      "draw.output.text > title.text",
      "photo.value > title.text",
      "rows.value > each.over",
      "draw.output > again.start.p",
      "title.text > again.title",
      "each.output.images > best.over",
      "photo.value > best.reference",
      "best.output.images.0 > framed.picture",
    ])
  })

  it("of inner nodes stay inside, and other names refer to outer nodes", () => {
    const nodes = [
      {
        id: "draw",
        type: "workflow",
        workflow: "d",
        properties: { radius: "{{ round }}", image: "{{ photo }}" },
      },
      { id: "made", type: "value", values: { picture: "{{ draw.output }}", size: "{{ title.size }}" } },
    ]
    const document = graph(
      PHOTO,
      DRAW,
      { id: "title", type: "value", values: { size: 3 } },
      {
        id: "again",
        type: "loop",
        do: { nodes, connections: [{ from: "photo.value", to: "made.x" }], result: "made.outputs" },
      },
    )
    expect(ends(document)).toEqual(["photo.value > again.do", "title.size > again.do"])
  })

  it("are written by a connection, and removed with it", () => {
    const document = graph(
      PHOTO,
      DRAW,
      { id: "framed", type: "graph", graph: "Frame", version: 1 },
      {
        id: "text",
        type: "value",
        values: { title: "Photo:" },
      },
      { id: "each", type: "map", over: "", do: { workflow: "sharpen" } },
    )
    let changed = withConnection(document, "photo.value", "framed.picture")
    expect(changed.nodes[2]?.inputs).toEqual({ picture: "{{ input.photo }}" })
    changed = withConnection(changed, "draw.output.images.0", "framed.picture")
    expect(changed.nodes[2]?.inputs).toEqual({ picture: "{{ draw.output.images.0 }}" })
    changed = withConnection(changed, "draw.output.text", "text.title")
    expect(changed.nodes[3]?.values).toEqual({ title: "Photo: {{ draw.output.text }}" })
    changed = withConnection(
      withConnection(changed, "draw.output.images", "each.over"),
      "photo.value",
      "each.image",
    )
    expect(changed.nodes[4]).toMatchObject({
      over: "draw.output.images",
      do: { properties: { image: "{{ input.photo }}" } },
    })
    expect(changed.connections).toEqual([])
    const whole = namesIn(changed).filter((reference) => reference.isWhole)
    expect(whole.map((reference) => reference.to)).toEqual(["framed.picture", "each.over", "each.image"])
    const bare = withoutReferences(changed, whole)
    expect(bare.nodes[2]?.inputs).toBeUndefined()
    expect(bare.nodes[4]).toMatchObject({ over: "", do: { workflow: "sharpen" } })
  })

  it("follow a renamed node, and copies refer to copies", () => {
    const document = graph(PHOTO, DRAW, {
      id: "each",
      type: "map",
      over: "draw.output.images",
      do: {
        workflow: "draw",
        properties: { a: "{{ draw.output.text }}, 'draw' {{ input.photo | default('draw') }}" },
      },
    })
    const renamed = rename(rename(document, "draw", "paint"), "photo", "shot").nodes[2]
    expect(renamed).toMatchObject({
      over: "paint.output.images",
      do: {
        workflow: "draw",
        properties: { a: "{{ paint.output.text }}, 'draw' {{ input.shot | default('draw') }}" },
      },
    })
    const copied = paste(document, {}, clipOf(document, {}, new Set(["draw", "each"])))
    expect(copied.document.nodes.at(-1)).toMatchObject({ id: "each_2", over: "draw_2.output.images" })
  })

  it("are part of the layout", async () => {
    const places = await placesFor(
      graph({ id: "late", type: "value", values: { a: "{{ first.output }}" } }, { ...DRAW, id: "first" }),
    )
    expect(places.first?.x).toBeLessThan(places.late?.x ?? 0)
  })
})

describe("ports by name", () => {
  const document = graph(
    PHOTO,
    ROWS,
    { id: "framed", type: "graph", graph: "Frame", version: 2, inputs: { picture: "{{ photo }}" } },
    { id: "each", type: "map", over: "rows", do: { graph: "Frame", version: 2 } },
    { id: "again", type: "loop", start: { p: "" }, do: { workflow: "sharpen" } },
    { id: "whole", type: "value", values: { same: "{{ framed.framed }}", text: "a {{ photo }}" } },
  )
  const types = new GraphTypes(document, OFFERS, inner)
  const node = (id: string) => document.nodes.find((node) => node.id === id) as GraphNode
  const portsOf = (id: string, side: "inputs" | "outputs") =>
    types.ports(node(id))[side].map((port) => `${port.name}: ${port.type.name}`)

  it("are the ports of the nested graph, with their types", () => {
    expect(portsOf("framed", "inputs")).toEqual(["picture: image", "title: text"])
    expect(portsOf("framed", "outputs")).toEqual(["framed: result", "outputs: any"])
    expect(portsOf("each", "inputs")).toEqual(["over: any[]", "picture: image", "title: text"])
    expect(portsOf("again", "inputs")).toEqual(["start.p: any", "image: image", "size: integer"])
    expect(portsOf("again", "outputs")[0]).toBe("output: result")
    expect(portsOf("whole", "outputs")).toEqual(["same: result", "text: text", "outputs: any"])
  })

  it("exist for values that are read, even if the workflow is unknown", () => {
    const unknown = graph(PHOTO, {
      id: "x",
      type: "workflow",
      workflow: "gone",
      properties: { a: "{{ photo }}", b: 1 },
    })
    const [, x] = unknown.nodes
    const ports = new GraphTypes(unknown, OFFERS).ports(x as GraphNode).inputs
    expect(ports.map((port) => port.name)).toEqual(["a"])
  })

  it("reject mismatches and cycles, and accept the part of a value that fits", () => {
    expect(types.wireFrom("photo.value", "framed.title")).toBeNull()
    expect(types.wireFrom("framed.framed", "again.image")).toBe("framed.framed")
    expect(types.wireFrom("framed.framed", "each.over")).toBe("framed.framed.images")
    expect(types.wireFrom("whole.same", "framed.picture")).toBeNull()
    expect(types.wireFrom("rows.value", "each.over")).toBe("rows.value")
  })

  it("offer the values that may be read", () => {
    expect(types.namesFor("framed")).toContain("input.photo")
    expect(types.namesFor("framed")).not.toContain("whole.same")
    expect(types.namesFor("again")).toContain("framed.framed.images.0")
    expect(types.fieldsOfItem(node("each"))).toEqual(["caption", "photo"])
  })

  it("show problems of inner nodes", () => {
    const at = (place: string, port: string) => portOf({ node: place, port, code: "", message: "" })
    expect(at("again/do", "image")).toBe("image")
    expect(at("framed/.picture", "value")).toBe("picture")
    expect(at("again/.start", "p")).toBe("start.p")
    expect(at("each/.each", "over")).toBe("over")
    expect(at("again/soften", "radius")).toBe("do")
  })
})
