import { describe, expect, it } from "vitest"
import { barsOf, kindsIn, waitsOf } from "./bars"

const SPANS = [
  { kind: "queued" as const, start: 0, end: 5 },
  { kind: "running" as const, start: 5, end: 20 },
]
const NO_SECONDS = { running: 0, asking: 0, queued: 0, held: 0, retried: 0 }

describe("a timeline", () => {
  it("has bars as fractions of its axis", () => {
    expect(barsOf({ spans: SPANS }, 20)).toEqual([
      { kind: "queued", from: 0, to: 0.25, seconds: 5 },
      { kind: "running", from: 0.25, to: 1, seconds: 15 },
    ])
    expect(barsOf({ spans: SPANS }, 0)[1]).toMatchObject({ from: 1, to: 1 })
  })

  it("lists the longest wait first, averaged per execution", () => {
    const waits = waitsOf({ ...NO_SECONDS, running: 9, queued: 4, asking: 60, held: 0.01 }, 2)
    expect(waits).toEqual([
      { kind: "asking", seconds: 30 },
      { kind: "queued", seconds: 2 },
    ])
  })

  it("has a legend with only the kinds that occur", () => {
    const nodes = [
      { seconds: { ...NO_SECONDS, queued: 5, held: 0.001 } },
      { seconds: { ...NO_SECONDS, running: 1 } },
    ]
    expect(kindsIn(nodes)).toEqual(["running", "queued"])
  })
})
