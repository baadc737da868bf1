import { describe, expect, it } from "vitest"
import type { StepAnswer } from "@/api/schema"
import {
  added,
  bestFirst,
  type Candidate,
  factsOf,
  fits,
  highestFirst,
  isUnjudged,
  labelsOf,
  lineageOf,
  promptOf,
  stoppedIds,
  waitingIds,
  withEvent,
  withStableUrls,
} from "./candidates"
import { BEST, CELL, layout, neighborOf, STEP_MAX, shownIds } from "./tree"

function candidateWith(id: string, step = 0, fields: Partial<Candidate> = {}): Candidate {
  return {
    id,
    step,
    parent: null,
    status: "active",
    judged_by: null,
    score: 1000,
    judge_score: null,
    judge_error: null,
    child_count: 0,
    seed: null,
    seed_text: null,
    properties: {},
    job_id: null,
    provider_job_id: null,
    output_index: 0,
    path: `runs/${id}.png`,
    content_type: "image/png",
    size: 1,
    url: `/files/${id}`,
    small_url: null,
    text: null,
    created_at: `2026-01-01T00:00:${id.padStart(2, "0")}Z`,
    urlAt: 0,
    ...fields,
  }
}

const TREE = [
  candidateWith("1"),
  candidateWith("2"),
  candidateWith("3", 1, { parent: "1" }),
  candidateWith("4", 2, { parent: "3" }),
]
const byId = (all: readonly Candidate[]) => new Map(all.map((candidate) => [candidate.id, candidate]))
const ids = (all: readonly Candidate[]) => all.map((candidate) => candidate.id)

describe("candidates of a run", () => {
  it("are labeled by step and number", () => {
    expect([...labelsOf(TREE).values()]).toEqual(["1·01", "1·02", "2·01", "3·01"])
  })

  it("have a lineage back to their base", () => {
    expect(ids(lineageOf("4", byId(TREE)))).toEqual(["4", "3", "1"])
    expect(lineageOf("x", byId(TREE))).toEqual([])
    const loop = [candidateWith("1", 0, { parent: "2" }), candidateWith("2", 1, { parent: "1" })]
    expect(ids(lineageOf("1", byId(loop)))).toEqual(["1", "2"])
  })

  it("keep the displayed URL until it is too old", () => {
    const again = { ...TREE[0], url: "/files/1?again" } as Candidate
    expect(withStableUrls(TREE, [again], 1_000)[0]?.url).toBe("/files/1")
    expect(withStableUrls(TREE, [again], 601_000)[0]?.url).toBe("/files/1?again")
    expect(withStableUrls(TREE, [{ ...again, url: null }], 1_000)[0]?.url).toBeNull()
  })

  it("are appended, or updated in place", () => {
    const fresh = [candidateWith("2", 0, { status: "winner" }), candidateWith("5", 1)]
    const { all, next } = added({ all: TREE, next: "4" }, fresh, 1)
    expect(ids(all)).toEqual(["1", "2", "3", "4", "5"])
    expect([all[1]?.status, next]).toEqual(["winner", "4"])
  })

  it("are updated by events", () => {
    const start = { all: TREE, next: null }
    const crowned = withEvent(start, "crowned", { candidate_id: "1" })
    expect(crowned.all[0]?.status).toBe("winner")
    expect(withEvent(crowned, "undone", { candidate_id: "1", after: "approved" }).all[0]?.status).toBe(
      "approved",
    )
    expect(
      withEvent(start, "voted", { scores: { "2": 1016 } }).all.map((candidate) => candidate.score),
    ).toEqual([1000, 1016, 1000, 1000])
    expect(withEvent(start, "submitted", {})).toBe(start)
  })

  it("stop after a rejected parent, and wait if approval is required", () => {
    const all = TREE.map((candidate) =>
      candidate.id === "1" ? { ...candidate, status: "rejected" as const } : candidate,
    )
    expect([...stoppedIds(all)]).toEqual(["1", "3", "4"])
    const steps = [true, true, false].map((needs_approval) => ({ needs_approval }) as StepAnswer)
    expect([...waitingIds(all, steps)]).toEqual(["2"])
    expect([...waitingIds(TREE, steps)]).toEqual(["1", "2", "3"])
  })

  it("contain the judge's score, who judged them, and whether a person has to look at them", () => {
    const judge = { name: "exposure", approve_above: 0.7, reject_below: null }
    const steps = [{ needs_approval: true, judge } as unknown as StepAnswer]
    const start = { all: [candidateWith("1"), candidateWith("2"), candidateWith("3")], next: null }
    expect([...waitingIds(start.all, steps)]).toEqual([])
    const scored = withEvent(start, "scored", { candidate_id: "1", score: 0.9 })
    const judged = withEvent(scored, "approved", { candidate_id: "1", judged_by: "judge" })
    expect([judged.all[0]?.judge_score, judged.all[0]?.judged_by]).toEqual([0.9, "judge"])
    const unclear = withEvent(judged, "scored", { candidate_id: "3", score: 0.5 })
    const failed = withEvent(unclear, "job_failed", {
      candidate_id: "2",
      is_judge: true,
      error: "out of memory",
    })
    expect(failed.all[1]?.judge_error).toBe("out of memory")
    expect([...waitingIds(failed.all, steps)]).toEqual(["2", "3"])
    expect(ids(highestFirst(failed.all))).toEqual(["1", "3", "2"])
    expect(failed.all.map((candidate) => isUnjudged(candidate, steps))).toEqual([false, false, false])
    const undone = withEvent(failed, "undone", { candidate_id: "1", after: "active", judged_by: null })
    expect([undone.all[0]?.status, undone.all[0]?.judged_by]).toEqual(["active", null])
    expect(withEvent(start, "job_failed", { error: "broken" })).toBe(start)
  })

  it("are sorted in the order in which the run chooses parents", () => {
    const all = [
      candidateWith("1", 0, { status: "rejected", score: 2000 }),
      candidateWith("2", 0, { score: 1010 }),
      candidateWith("3", 0, { score: 1020 }),
      candidateWith("4", 0, { status: "winner", score: 900 }),
      candidateWith("5", 0, { status: "approved" }),
    ]
    expect(ids(bestFirst(all))).toEqual(["4", "5", "3", "2", "1"])
    const waiting = new Set(["2"])
    const shown = (show: Parameters<typeof fits>[1]) =>
      ids(all.filter((candidate) => fits(candidate, show, waiting)))
    expect([shown("all").length, shown("judge"), shown("chosen"), shown("open"), shown("rejected")]).toEqual([
      5,
      ["2"],
      ["4", "5"],
      ["2", "3"],
      ["1"],
    ])
  })

  it("show their prompt and their other properties", () => {
    const properties = {
      steps: 28,
      text: "a wide valley",
      input: "39d64637-ac33-4ae3-9388-a0d8afdcfa70",
      mask: null,
    }
    expect(promptOf(properties)).toBe("a wide valley")
    expect(promptOf({ subject: "a cat in a hat", style: "soft light" })).toBe("a cat in a hat")
    expect(promptOf({ mode: "fast" })).toBeNull()
    expect(factsOf(properties, "a file")).toEqual([
      ["steps", "28"],
      ["input", "a file"],
    ])
  })
})

describe("the tree", () => {
  it("centers parents beside their children, in one column per step", () => {
    const all = [...TREE, candidateWith("5", 1, { parent: "1" })]
    const { places, start } = layout(all, 3, new Set(), null)
    const at = new Map(places.map((place) => [place.candidate.id, place]))
    expect(at.get("3")?.y).toBe(at.get("4")?.y)
    expect(at.get("1")?.y).toBe(((at.get("3")?.y ?? 0) + (at.get("5")?.y ?? 0)) / 2)
    expect((at.get("4")?.x ?? 0) - (at.get("1")?.x ?? 0)).toBe(2 * CELL.column)
    expect(start).toBe(((at.get("1")?.y ?? 0) + (at.get("2")?.y ?? 0)) / 2)
    const lows = places.filter((place) => place.candidate.step === 1).map((place) => place.y)
    expect(new Set(lows).size).toBe(lows.length)
  })

  it("can be navigated with arrow keys", () => {
    const { places } = layout(TREE, 3, new Set(), null)
    const go = (id: string, key: string) => neighborOf(places, id, `Arrow${key}`)
    expect([go("1", "Right"), go("3", "Right"), go("3", "Left"), go("1", "Left")]).toEqual([
      "3",
      "4",
      "1",
      null,
    ])
    expect([go("1", "Down"), go("2", "Up"), go("2", "Down"), neighborOf(places, "1", "a")]).toEqual([
      "2",
      "1",
      null,
      null,
    ])
  })

  it("shows the best candidates of a large step with their ancestors, and the selected one", () => {
    const base = Array.from({ length: 3 }, (_, index) => candidateWith(String(index + 1)))
    const many = Array.from({ length: STEP_MAX + 1 }, (_, index) =>
      candidateWith(String(index + 10), 1, { parent: String((index % 3) + 1), score: 1000 + index }),
    )
    const all = [...base, ...many]
    expect(shownIds(all, new Set(), null).size).toBe(3 + BEST)
    expect(shownIds(all, new Set(), "10").has("10")).toBe(true)
    expect(shownIds(all, new Set([1]), null).size).toBe(all.length)
    const { rests } = layout(all, 2, new Set(), null)
    expect(rests.map(({ step, hidden }) => [step, hidden])).toEqual([[1, STEP_MAX + 1 - BEST]])
  })
})
