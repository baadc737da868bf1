import { describe, expect, it } from "vitest"
import { changes, limitsOf, typedOf } from "./limits"

const USUAL = {
  max_queued: null,
  min_priority: -1000,
  max_priority: 1000,
  retention_days: null,
  max_storage_bytes: null,
}

describe("limits of a tenant", () => {
  it("are parsed in the format in which they are shown", () => {
    const own = { ...USUAL, max_queued: 5, retention_days: 30, max_storage_bytes: 2_500_000_000 }
    expect(typedOf(own)).toEqual({ queued: "5", low: "-1000", high: "1000", days: "30", gigabytes: "2.5" })
    expect(limitsOf(typedOf(own))).toEqual({ limits: own })
    expect(limitsOf(typedOf(USUAL))).toEqual({ limits: USUAL })
  })
  it("that are invalid are reported", () => {
    const typed = { queued: "-1", low: "5", high: "4", days: "0", gigabytes: "much" }
    const answer = limitsOf(typed)
    expect("wrong" in answer && [...answer.wrong].sort()).toEqual(["days", "gigabytes", "high", "queued"])
  })
  it("are set with as few calls as possible", () => {
    expect(changes(USUAL, USUAL)).toEqual([])
    expect(changes(USUAL, { ...USUAL, max_queued: 7 })).toEqual([
      { path: "limits", body: { max_queued: 7, min_priority: -1000, max_priority: 1000 } },
    ])
    expect(
      changes(USUAL, { ...USUAL, retention_days: 3, max_storage_bytes: 0 }).map((change) => change.path),
    ).toEqual(["retention", "quota"])
  })
})
