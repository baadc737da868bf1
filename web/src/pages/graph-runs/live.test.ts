import { expect, test } from "vitest"
import type { GraphRunSummaries, GraphRunSummary } from "@/api/schema"
import { withRun } from "./live"

function run(id: string, minute: number, status = "running", graph = "g"): GraphRunSummary {
  const created_at = `2026-01-01T00:0${minute}:00Z`
  return { id, status, graph_id: graph, created_at } as GraphRunSummary
}

const PAGE: GraphRunSummaries = { runs: [run("b", 2), run("a", 1)], next: null }
const ids = ({ runs }: GraphRunSummaries) => runs.map((run) => `${run.id} ${run.status}`)

test("a known run is updated in place, and a new one is added at the front", () => {
  expect(ids(withRun(PAGE, run("a", 1, "completed"), {}))).toEqual(["b running", "a completed"])
  expect(ids(withRun(PAGE, run("c", 3), {}))).toEqual(["c running", "b running", "a running"])
  expect(ids(withRun({ runs: [], next: null }, run("c", 3), {}))).toEqual(["c running"])
})

test("runs that don't match the filter aren't listed", () => {
  expect(ids(withRun(PAGE, run("a", 1, "failed"), { status: "running" }))).toEqual(["b running"])
  expect(withRun(PAGE, run("c", 3, "running", "other"), { graph: "g" })).toBe(PAGE)
  expect(withRun(PAGE, run("older", 0), {})).toBe(PAGE)
})
