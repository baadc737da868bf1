import { describe, expect, it } from "vitest"
import { filesOf, isWhole, numberOf, readValue, stepsOf, variablesOf } from "./start"

const DOCUMENT = {
  name: "Soft colours",
  steps: [
    {
      name: "Base",
      workflow: "negative",
      properties: { width: "{{ variables.width }}", text: "a {{variables.subject}}, {{ variables.width }}" },
    },
    {
      name: "Soften",
      effect: "soften",
      properties: { input: "{{ parent.file }}" },
      children_per_parent: 2,
      keep: 4,
      needs_approval: true,
    },
  ],
}

describe("the settings of a new run", () => {
  it("contain each variable once, in order", () => {
    expect(variablesOf(DOCUMENT)).toEqual(["width", "subject"])
    expect(variablesOf({})).toEqual([])
  })

  it("parse values in the same way as the command line", () => {
    expect(["3", "true", "a cat", '"3"'].map(readValue)).toEqual([3, true, "a cat", "3"])
  })

  it("accept whole numbers from 1", () => {
    expect(["1", " 20 ", "0", "-1", "1.5", "", "x"].map(isWhole)).toEqual([
      true,
      true,
      false,
      false,
      false,
      false,
      false,
    ])
    expect([numberOf(""), numberOf("7")]).toEqual([null, 7])
  })

  it("include the steps of a document", () => {
    const preset = { children: 1, keep: null, needsApproval: false, judge: null }
    expect(stepsOf(DOCUMENT)).toEqual([
      { name: "Base", work: "negative", ...preset },
      { name: "Soften", work: "soften", children: 2, keep: 4, needsApproval: true, judge: null },
    ])
    const judged = { name: "Base", workflow: "negative", judge: { measure: "exposure", approve_above: 0.7 } }
    expect(stepsOf({ steps: [judged] })).toEqual([
      { ...preset, name: "Base", work: "negative", judge: "exposure" },
    ])
  })
})

it("a variable that a step takes as a file is picked, not typed", () => {
  const offers = [
    { kind: "workflow", name: "tint", properties: [{ name: "input", type: "image" }] },
    { kind: "effect", name: "tint", properties: [{ name: "input", type: "text" }] },
  ]
  const step = (input: string, work = "workflow") => ({
    steps: [{ name: "A", [work]: "tint", properties: { input } }],
  })
  expect([...filesOf(step("{{ variables.photo }}"), offers)]).toEqual([["photo", "image"]])
  expect([...filesOf(step("{{ parent.file }}"), offers)]).toEqual([])
  expect([...filesOf(step("of {{ variables.photo }}"), offers)]).toEqual([])
  expect([...filesOf(step("{{ variables.photo }}", "effect"), offers)]).toEqual([])
  expect([...filesOf({}, offers)]).toEqual([])
})
