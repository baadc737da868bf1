import { describe, expect, it } from "vitest"
import type { OfferedProperty, WorkflowOffer } from "@/api/schema"
import { clipOf, paste, rename } from "./copy"
import { diffOf } from "./diff"
import { connect, documentOf, freeId, type GraphDocument, isSame, remove, setProperty } from "./document"
import { withShortMessage } from "./facts"
import { began, changed, redone, undone } from "./history"
import { filledPlaces, placesFor, placesOf, withLayout } from "./layout"
import { asType, valuesForQuote } from "./RunDialog"
import { fits, GraphTypes, offersOf, typeNamed } from "./types"
import { yamlOf } from "./yaml"

function property(name: string, type: string, required = false): OfferedProperty {
  return {
    name,
    type,
    required,
    default: null,
    minimum: null,
    maximum: null,
    step: null,
    choices: null,
    description: "",
  }
}

function offer(name: string, ...properties: OfferedProperty[]): WorkflowOffer {
  return { kind: "workflow", name, version: 1, price_tokens: 2, typical_seconds: null, properties }
}

const OFFERS = offersOf([
  offer("draw", property("width", "integer"), property("prompt", "text")),
  offer("soften", property("input", "image", true), property("radius", "number")),
])
const DRAWN: GraphDocument = {
  name: "Two",
  nodes: [
    { id: "text", type: "input", value_type: "text" },
    { id: "draw", type: "workflow", workflow: "draw", properties: { width: 64 } },
    { id: "soften", type: "workflow", workflow: "soften" },
    { id: "each", type: "fanout", mode: "distribute", per_item: true },
    { id: "all", type: "merge", over: "each" },
    { id: "picture", type: "output" },
  ],
  connections: [{ from: "draw.output", to: "soften.input" }],
}
const types = (document: GraphDocument = DRAWN) => new GraphTypes(document, OFFERS)

describe("a document", () => {
  it("is parsed from its short form, with connections that are written as values", () => {
    const read = documentOf({
      name: "n",
      nodes: [
        {
          id: "a",
          type: "workflow",
          workflow: "w",
          version: null,
          fallback_strategy: "none",
          properties: { x: { from: "b.value" }, y: 1 },
        },
        { id: "b", type: "input", value_type: "text", required: true },
        { id: "f", type: "fanout", mode: "broadcast", output_count: 2, max_items: 100 },
        { id: "?", type: "nothing" },
      ],
    })
    expect(read).toEqual({
      name: "n",
      nodes: [
        { id: "a", type: "workflow", workflow: "w", properties: { y: 1 } },
        { id: "b", type: "input", value_type: "text" },
        { id: "f", type: "fanout" },
      ],
      connections: [{ from: "b.value", to: "a.x" }],
    })
    expect(documentOf("text")).toBeNull()
    expect(documentOf({ nodes: 3 })).toBeNull()
  })

  it("replaces a value by a connection, and removes a value", () => {
    const wired = connect(DRAWN, "text.value", "draw.width")
    expect(wired.nodes[1]).toEqual({ id: "draw", type: "workflow", workflow: "draw" })
    expect(connect(wired, "soften.output", "draw.width").connections).toHaveLength(2)
    expect(setProperty(DRAWN, "draw", "width", 32).nodes[1]?.properties).toEqual({ width: 32 })
  })

  it("loses nodes together with their connections", () => {
    const rest = remove(DRAWN, new Set(["draw"]))
    expect(rest.nodes.map((node) => node.id)).not.toContain("draw")
    expect(rest.connections).toEqual([])
    expect(remove(DRAWN, new Set(), new Set(["soften.input"])).connections).toEqual([])
  })

  it("renames a node in its connections and in references to it", () => {
    const renamed = rename(rename(DRAWN, "draw", "paint"), "each", "one")
    expect(renamed.connections).toEqual([{ from: "paint.output", to: "soften.input" }])
    expect(renamed.nodes.find((node) => node.id === "all")?.over).toBe("one")
  })

  it("is copied with the connections between the copied nodes", () => {
    const ids = new Set(["draw", "soften"])
    const pasted = paste(DRAWN, {}, clipOf(DRAWN, { draw: { x: 1, y: 2 } }, ids))
    expect(pasted.ids).toEqual(["draw_2", "soften_2"])
    expect(pasted.document.connections).toContainEqual({ from: "draw_2.output", to: "soften_2.input" })
    expect(pasted.places.draw_2).toEqual({ x: 41, y: 42 })
    expect(freeId(pasted.document, "draw")).toBe("draw_3")
    expect(freeId(pasted.document, "a b")).toBe("a_b")
  })

  it("is equal regardless of the order of its fields", () => {
    const other = { connections: DRAWN.connections, nodes: DRAWN.nodes, name: "Two" }
    expect(isSame(DRAWN, other)).toBe(true)
    expect(isSame(DRAWN, { ...other, name: "Three" })).toBe(false)
  })
})

describe("types of ports", () => {
  it("fit in the same way as in the control plane", () => {
    expect(fits(typeNamed("integer"), typeNamed("number"))).toBe(true)
    expect(fits(typeNamed("number"), typeNamed("integer"))).toBe(false)
    expect(fits(typeNamed("image"), typeNamed("file"))).toBe(true)
    expect(fits(typeNamed("image[]"), typeNamed("image"))).toBe(false)
    expect(fits(typeNamed("any"), typeNamed("video"))).toBe(true)
  })

  it("reject impossible connections", () => {
    const graphTypes = types({ ...DRAWN, connections: [] })
    expect(graphTypes.wireFrom("text.value", "soften.input")).toBeNull()
    expect(graphTypes.wireFrom("text.value", "draw.width")).toBeNull()
    expect(graphTypes.wireFrom("text.value", "draw.prompt")).toBe("text.value")
    expect(graphTypes.wireFrom("draw.output", "soften.input")).toBe("draw.output")
    expect(graphTypes.wireFrom("draw.nothing", "soften.input")).toBeNull()
  })

  it("reject a second connection and a cycle", () => {
    expect(types().wireFrom("draw.output", "soften.input")).toBeNull()
    expect(types().wireFrom("soften.output", "draw.prompt")).toBeNull()
    expect(types().wireFrom("draw.output", "draw.prompt")).toBeNull()
  })

  it("accept a part of a value if the whole value doesn't fit", () => {
    const graphTypes = types({ ...DRAWN, connections: [] })
    expect(graphTypes.wireFrom("draw.output", "each.items")).toBe("draw.output.images")
    expect(graphTypes.wireFrom("soften.output", "draw.prompt")).toBe("soften.output.text")
    expect(graphTypes.sourcesFor("soften.input")).toContain("draw.output")
    expect(graphTypes.sourcesFor("soften.input")).not.toContain("text.value")
  })

  it("pass through conditions and fan-outs", () => {
    const document: GraphDocument = {
      name: "n",
      nodes: [
        { id: "list", type: "input", value_type: "image[]" },
        { id: "each", type: "fanout", mode: "distribute", per_item: true },
        { id: "if", type: "condition", condition: "output.exists" },
        { id: "all", type: "merge" },
      ],
      connections: [
        { from: "list.value", to: "each.items" },
        { from: "each.item", to: "if.input" },
        { from: "if.true", to: "all.input_0" },
      ],
    }
    const graphTypes = types(document)
    expect(graphTypes.at("if.true")?.name).toBe("image")
    const merge = document.nodes[3]
    expect(merge && graphTypes.ports(merge).inputs.map((port) => port.name)).toEqual(["input_0", "input_1"])
  })
})

describe("YAML", () => {
  it("is formatted in the style of handwritten YAML", () => {
    expect(yamlOf(DRAWN)).toBe(`name: Two
nodes:
  - {id: text, type: input, value_type: text}
  - {id: draw, type: workflow, workflow: draw, properties: {width: 64}}
  - {id: soften, type: workflow, workflow: soften}
  - {id: each, type: fanout, mode: distribute, per_item: true}
  - {id: all, type: merge, over: each}
  - {id: picture, type: output}
connections:
  - {from: draw.output, to: soften.input}
`)
  })

  it("quotes texts that YAML would parse as other types", () => {
    const document: GraphDocument = {
      name: "yes",
      nodes: [{ id: "if", type: "condition", condition: 'output.text == "a: b"' }],
      connections: [],
    }
    expect(yamlOf(document)).toContain('name: "yes"')
    expect(yamlOf(document)).toContain('condition: "output.text == \\"a: b\\""')
    expect(yamlOf({ ...document, name: "1.5" })).toContain('name: "1.5"')
  })

  it("keeps the graph's settings, and the nodes' own values that override them", () => {
    const settings = { max_tokens: 9, reuse: true, priority: 5, at_once: 2, deadline: 60 }
    const own = { id: "draw", type: "workflow", workflow: "draw", priority: 0, reuse: false }
    const read = documentOf({ name: "All", ...settings, nodes: [own], connections: [] })
    expect(read).toEqual({ name: "All", ...settings, nodes: [own], connections: [] })
    expect(read && yamlOf(read)).toContain(
      "max_tokens: 9\nreuse: true\npriority: 5\nat_once: 2\ndeadline: 60\nnodes:",
    )
    const parsed = documentOf({ name: "All", nodes: [{ ...own, reuse: undefined }] })
    expect(parsed?.nodes).toEqual([{ id: "draw", type: "workflow", workflow: "draw" }])
  })
})

describe("the undo history", () => {
  const sheet = (name: string) => ({ document: { ...DRAWN, name }, places: {} })

  it("undoes and redoes every step", () => {
    const drawn = changed(changed(began(sheet("a")), sheet("b")), sheet("c"))
    const back = undone(undone(drawn))
    expect(back.now.document.name).toBe("a")
    expect(undone(back)).toBe(back)
    expect(redone(back).now.document.name).toBe("b")
    expect(changed(back, sheet("d")).future).toEqual([])
  })

  it("treats all typing in one field as one step", () => {
    const typed = changed(changed(began(sheet("")), sheet("a"), "name"), sheet("ab"), "name")
    expect(undone(typed).now.document.name).toBe("")
  })
})

describe("two versions", () => {
  it("are compared line by line", () => {
    expect(diffOf("a\nb\nc\n", "a\nx\nc\nd\n").map((line) => `${line.kind} ${line.text}`)).toEqual([
      "same a",
      "gone b",
      "new x",
      "same c",
      "new d",
    ])
  })
})

describe("a layout", () => {
  it("goes from left to right along the connections", async () => {
    const places = await placesFor(DRAWN)
    expect(places.soften?.x).toBeGreaterThan(places.draw?.x ?? 0)
    expect(Object.keys(places)).toHaveLength(6)
  })

  it("is stored with the graph, without deleted nodes", () => {
    const document = withLayout(DRAWN, { draw: { x: 1, y: 2 }, gone: { x: 3, y: 4 } })
    expect((document as unknown as { layout: unknown }).layout).toEqual({ draw: [1, 2] })
    expect(placesOf({ id: "g", version: 1, document })).toEqual({ draw: { x: 1, y: 2 } })
    expect(documentOf(document)).toEqual(DRAWN)
  })

  it("places new nodes in free space", () => {
    const places = filledPlaces({ a: { x: 0, y: 0 } }, { a: { x: 9, y: 9 }, b: { x: 10, y: 10 } })
    expect(places.a).toEqual({ x: 0, y: 0 })
    expect(places.b?.y).toBeGreaterThanOrEqual(220)
  })
})

describe("the inputs of a run", () => {
  it("are converted to the types of the input nodes", () => {
    expect(asType("12", "integer")).toBe(12)
    expect(asType("12", "text")).toBe("12")
    expect(asType("a\n\nb", "text[]")).toEqual(["a", "b"])
    expect(asType('{"a": 1}', "any")).toEqual({ a: 1 })
    expect(asType("{a", "any")).toBe("{a")
  })

  it("count files that are still being uploaded", () => {
    const file = (mediaId: string | null) => ({ name: "a.png", size: 1, url: null, mediaId, upload: null })
    const inputs = [
      { id: "photos", type: "input", value_type: "image[]" },
      { id: "one", type: "input", value_type: "image" },
      { id: "size", type: "input", value_type: "integer" },
    ] as const
    const files = { photos: [file("m"), file(null), null], one: [null] }
    expect(valuesForQuote(inputs, { size: 3 }, files)).toEqual({ photos: ["m", "a.png"], size: 3 })
  })
})

/** The API accepts all of these as ids. */
const WORDS_OF_OBJECTS = ["constructor", "toString", "valueOf", "hasOwnProperty"]

describe("names that every object inherits", () => {
  const nodes = [
    ...WORDS_OF_OBJECTS.map((id) => ({ id, type: "input", value_type: "image" })),
    { id: "out", type: "output" },
    { id: "w", type: "workflow", workflow: "negative", properties: JSON.parse('{"__proto__": {"a": 1}}') },
  ]
  const wires = WORDS_OF_OBJECTS.map((id) => ({ from: `${id}.value`, to: "out.value" }))
  const document = documentOf({ name: "x", nodes, connections: wires }) as GraphDocument

  it("are valid node ids, and don't affect other positions", async () => {
    const before = Object.getOwnPropertyNames(Object).length
    const laid = await placesFor(document)
    const places = filledPlaces({}, laid)
    for (const { id } of document.nodes) expect(Number.isFinite(places[id]?.x), id).toBe(true)
    expect(Object.keys((withLayout(document, places) as unknown as { layout: object }).layout)).toHaveLength(
      6,
    )
    expect(withLayout(document, {})).toBe(document)
    expect(Object.getOwnPropertyNames(Object)).toHaveLength(before)
    const pasted = paste(document, {}, { ...clipOf(document, {}, new Set(["toString"])), places: {} })
    expect(pasted.places.toString_2).toEqual({ x: 40, y: 40 })
  })

  it("are neither ports nor values", () => {
    const types = new GraphTypes(document, OFFERS)
    for (const word of [...WORDS_OF_OBJECTS, "__proto__"]) {
      expect(types.at(`w.${word}`)).toBeNull()
      expect(types.at(`w.output.${word}`)).toBeNull()
    }
    const inputs = document.nodes.filter((node) => node.type === "input")
    expect(valuesForQuote(inputs, {}, {})).toEqual({})
    expect(Object.keys(document.nodes.at(-1)?.properties as object)).toEqual(["__proto__"])
  })
})

it("500 nodes at one position are moved apart quickly", () => {
  const stack = Array.from({ length: 250 }, (_, at) => [`a${at}`, { x: 0, y: at * 55 }] as const)
  const heap = Array.from({ length: 250 }, (_, at) => [`b${at}`, { x: 0, y: 0 }] as const)
  const places = filledPlaces(Object.fromEntries(stack), Object.fromEntries(heap))
  const tops = heap.map(([id]) => places[id]?.y ?? 0).sort((one, other) => one - other)
  for (const [at, y] of tops.entries()) expect(y - (tops[at - 1] ?? 249 * 55)).toBeGreaterThanOrEqual(220)
})

it("invisible characters are escaped, and parsed unchanged", () => {
  const text = yamlOf({ name: "a\u0085b\u007f \u202egnp", nodes: [], connections: [] })
  expect(text).toContain('name: "a\\u0085b\\u007f \\u202egnp"')
})

describe("deciding nodes", () => {
  const body = {
    name: "Decides",
    nodes: [
      { id: "rows", type: "input" },
      { id: "each", type: "map", over: "input.rows", do: { workflow: "draw" }, max_items: 100 },
      { id: "again", type: "loop", do: { workflow: "draw" }, until: "output.width > 5", at_most: 3 },
      { id: "look", type: "approve", message: "Good?", pick: true },
      { id: "which", type: "switch", cases: [{ name: "large", when: "output > 5" }] },
      { id: "made", type: "value", values: { text: "{{ rows }}" } },
      { id: "inner", type: "graph", graph: "Frame", version: 2, inputs: { photo: "{{ rows }}" } },
      { id: "best", type: "score", over: "each.output.images", measure: "sharpness", keep: 2 },
      { id: "result", type: "output" },
    ],
    connections: [
      { from: "each.output", to: "look.input" },
      { from: "inner.picture", to: "result.value" },
    ],
  }

  it("keep all of their fields", () => {
    const parsed = documentOf(body)
    expect(parsed?.nodes.map((node) => node.type)).toEqual(body.nodes.map((node) => node.type))
    expect(parsed?.nodes[6]).toEqual(body.nodes[6])
    expect(parsed?.connections).toEqual(body.connections)
  })

  it("have the ports that they define", () => {
    const parsed = documentOf(body)
    if (!parsed) throw new Error("unreadable")
    const types = new GraphTypes(parsed, () => undefined)
    const outputs = Object.fromEntries(
      parsed.nodes.map((node) => [node.id, types.ports(node).outputs.map((port) => port.name)]),
    )
    expect(outputs).toMatchObject({
      each: ["output"],
      again: ["output", "rounds", "done", "score"],
      look: ["approved", "rejected"],
      which: ["large", "default"],
      made: ["text", "outputs"],
      inner: ["picture", "outputs"],
      best: ["output"],
    })
    expect(types.at("best.output.images.0")?.name).toBe("image")
  })
})

describe("a problem beside its field", () => {
  const problem = { code: "wrong_field", node: "each" }

  it("does not name the field twice", () => {
    const other = { ...problem, port: "over", message: "over must name a value" }
    expect(withShortMessage(other).message).toBe("must name a value")
    expect(withShortMessage({ ...other, port: "input" }).message).toBe("over must name a value")
    expect(withShortMessage({ ...other, port: "" }).message).toBe("over must name a value")
  })

  it("says that nothing has been selected", () => {
    const message = "workflow must be a text of 1 to 200 characters, not ''"
    expect(withShortMessage({ ...problem, port: "workflow", message }).message).toBe("required")
  })
})
