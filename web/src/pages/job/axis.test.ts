import { expect, test } from "vitest"
import type { AttemptLine } from "@/api/schema"
import { axisOf, isRefunded, stateOfOutcome } from "./axis"

const at = (second: number) => new Date(Date.UTC(2026, 0, 1, 0, 0, second)).toISOString()

function line(changes: Partial<AttemptLine>): AttemptLine {
  return {
    attempt: 1,
    lease_number: 1,
    worker_id: "w1",
    queued_at: at(0),
    leased_at: at(2),
    started_at: at(4),
    ended_at: at(10),
    outcome: "failed",
    message: null,
    prompt: null,
    ...changes,
  }
}

test("attempts share one time axis", () => {
  const second = { attempt: 2, queued_at: at(10), leased_at: at(14), started_at: at(15), ended_at: at(20) }
  const job = { submitted_at: at(0), completed_at: at(20), attempts: [line({}), line(second)] }
  const { seconds, lines } = axisOf(job, new Date(at(50)))
  expect(seconds).toBe(20)
  expect(lines[0]?.bars.map(({ kind, from, to }) => [kind, from, to])).toEqual([
    ["waited", 0, 0.1],
    ["prepared", 0.1, 0.2],
    ["ran", 0.2, 0.5],
  ])
  expect(lines[1]?.bars.map((bar) => bar.seconds)).toEqual([4, 1, 5])
})

test("an attempt in progress reaches to the current time", () => {
  const running = line({ ended_at: null, outcome: null })
  const { seconds, lines } = axisOf(
    { submitted_at: at(0), completed_at: null, attempts: [running] },
    new Date(at(8)),
  )
  expect(seconds).toBe(8)
  expect(lines[0]?.bars.at(-1)).toMatchObject({ kind: "ran", to: 1, seconds: 4 })
})

test("unknown times are left out, and a job without attempts still has an axis", () => {
  const unknown = line({ queued_at: null, started_at: null })
  const job = { submitted_at: at(0), completed_at: at(10), attempts: [unknown] }
  expect(axisOf(job, new Date(at(10))).lines[0]?.bars.map((bar) => bar.kind)).toEqual(["ran"])
  expect(axisOf({ ...job, completed_at: null, attempts: [] }, new Date(at(0))).seconds).toBeGreaterThan(0)
})

test("outcomes are converted to states", () => {
  expect([null, "requeued", "expired", "completed"].map(stateOfOutcome)).toEqual([
    "running",
    "cancelled",
    "failed",
    "completed",
  ])
})

test("the tokens of a job without a result are refunded", () => {
  const states = ["queued", "processing", "completed", "failed", "cancelled"]
  expect(states.filter(isRefunded)).toEqual(["failed", "cancelled"])
})
