import { describe, expect, it } from "vitest"
import type { ComparedValue } from "@/api/schema"
import { pairOf, sectionsOf } from "./pair"

const row = (section: string, name: string) =>
  ({ section, name, a: "1", b: "2", is_same: false }) as ComparedValue

describe("a comparison", () => {
  it("is defined by its address", () => {
    expect(pairOf("a=1&b=2&show=all")).toEqual({ a: "1", b: "2", graph: "", show: "all" })
    expect(pairOf("graph=g")).toEqual({ a: "", b: "", graph: "g", show: "different" })
  })

  it("is shown section by section", () => {
    const sections = sectionsOf([row("inputs", "width"), row("outputs", "picture"), row("inputs", "text")])
    expect(sections.map(([name, values]) => [name, values.length])).toEqual([
      ["inputs", 2],
      ["outputs", 1],
    ])
  })
})
