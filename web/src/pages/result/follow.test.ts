import { expect, test } from "vitest"
import type { FollowedJob } from "@/api/schema"
import { fillOf, merged } from "./follow"

function job(change: Partial<FollowedJob>): FollowedJob {
  return {
    id: "1",
    status: "processing",
    effect_id: null,
    effect_slug: null,
    effect_title: null,
    video_id: null,
    stage: "making",
    stages: [],
    why: null,
    progress: null,
    expected_progress: null,
    seconds_left: null,
    node: null,
    node_title: null,
    step: null,
    steps: null,
    error: null,
    price_tokens: 2,
    refunded_tokens: 0,
    submitted_at: "2026-01-01T00:00:00Z",
    started_at: "2026-01-01T00:00:01Z",
    completed_at: null,
    ...change,
  }
}

test("the percentage only grows during a run, and starts again with the next", () => {
  const before = job({ progress: 60 })
  expect(merged(before, job({ progress: 40 })).progress).toBe(60)
  expect(merged(before, job({ progress: 80 })).progress).toBe(80)
  expect(merged(before, job({ progress: 5, started_at: "2026-01-01T00:01:00Z" })).progress).toBe(5)
})

test("an older event never undoes a final status", () => {
  const ended = job({ status: "completed", progress: 100 })
  expect(merged(ended, job({ progress: 40 }))).toBe(ended)
})

test("until progress is measured, the bar moves by estimate and shows no percentage", () => {
  const expected = job({ expected_progress: 20, seconds_left: 8 })
  expect(fillOf(expected, 0)).toEqual({ part: 0.2, isReal: false })
  expect(fillOf(expected, 4000)).toEqual({ part: 0.6, isReal: false })
  expect(fillOf(expected, 60_000).part).toBe(0.95)
  expect(fillOf(job({}), 4000)).toEqual({ part: 0, isReal: false })
  expect(fillOf(job({ progress: 62, expected_progress: null }), 4000)).toEqual({ part: 0.62, isReal: true })
})
