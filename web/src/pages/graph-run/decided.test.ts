import { describe, expect, it } from "vitest"
import type { ExecutionSeen } from "@/api/schema"
import { decidedOf } from "./decided"

function decisionOf(type: string, outputs: Record<string, unknown>, inputs: Record<string, unknown> = {}) {
  return decidedOf({ type }, [{ outputs, inputs } as unknown as ExecutionSeen])
}

describe("a decision", () => {
  it("is described in a few words", () => {
    expect(decisionOf("loop", { output: {}, rounds: 3, score: 0.12345 }).decision).toBe(
      "3 rounds, score 0.123",
    )
    expect(decisionOf("map", { output: { count: 2, failed: 1 } }).decision).toBe("2 items, 1 failed")
    expect(decisionOf("score", { output: { scored: [1, 2, 3], best: [1], score: 4 } }).decision).toBe(
      "kept 1 of 3, score 4",
    )
    expect(decisionOf("value", { text: "Hello", outputs: {} }).decision).toBe("text: Hello")
    expect(decisionOf("switch", { dark: {} })).toEqual({ decision: "branch: dark", way: "dark" })
    expect(decisionOf("approve", { approved: { images: [1] } }, { input: { images: [1, 2] } }).decision).toBe(
      "approved, 1 of 2",
    )
    expect(decisionOf("approve", { rejected: 1 }).decision).toBe("rejected")
  })

  it("is empty without an output, or for many items", () => {
    expect(decisionOf("switch", {}).decision).toBeNull()
    expect(decisionOf("workflow", { output: {} }).decision).toBeNull()
    const two = [1, 2].map(() => ({ outputs: { dark: 1 } }) as unknown as ExecutionSeen)
    expect(decidedOf({ type: "switch" }, two).decision).toBeNull()
  })
})
