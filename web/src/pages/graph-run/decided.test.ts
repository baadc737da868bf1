import { describe, expect, it } from "vitest"
import type { ExecutionSeen } from "@/api/schema"
import { decidedOf } from "./decided"

function told(type: string, outputs: Record<string, unknown>, inputs: Record<string, unknown> = {}) {
  return decidedOf({ type }, [{ outputs, inputs } as unknown as ExecutionSeen])
}

describe("what was decided", () => {
  it("is told in a few words", () => {
    expect(told("loop", { output: {}, rounds: 3, score: 0.12345 }).told).toBe("3 rounds, score 0.123")
    expect(told("map", { output: { count: 2, failed: 1 } }).told).toBe("2 items, 1 failed")
    expect(told("score", { output: { scored: [1, 2, 3], best: [1], score: 4 } }).told).toBe(
      "kept 1 of 3, score 4",
    )
    expect(told("value", { text: "Hello", outputs: {} }).told).toBe("text: Hello")
    expect(told("switch", { dark: {} })).toEqual({ told: "went dark", way: "dark" })
    expect(told("approve", { approved: { images: [1] } }, { input: { images: [1, 2] } }).told).toBe(
      "approved, 1 of 2",
    )
    expect(told("approve", { rejected: 1 }).told).toBe("rejected")
  })

  it("is nothing where nothing came out, or for many items", () => {
    expect(told("switch", {}).told).toBeNull()
    expect(told("workflow", { output: {} }).told).toBeNull()
    const two = [1, 2].map(() => ({ outputs: { dark: 1 } }) as unknown as ExecutionSeen)
    expect(decidedOf({ type: "switch" }, two).told).toBeNull()
  })
})
