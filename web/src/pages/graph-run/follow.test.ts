import { describe, expect, it } from "vitest"
import type { GraphRunAnswer } from "@/api/schema"
import { filesIn, nodeRuns, SteadyUrls, stampOf, withEvent } from "./follow"
import { sameAnswer } from "./Question"

const FILE = { file_id: "f", filename: "a.png", mime_type: "image/png", url: "/f?1" }
const NODE = { workflow: "draw", effect: null, skipped: 0, failed: 0, cancelled: 0 }
const EXECUTION = {
  node: "draw",
  index: [],
  status: "done",
  attempts: 1,
  outputs: { output: { images: [FILE], files: [FILE] } },
  started_at: "2026-01-01T00:00:00Z",
  ended_at: "2026-01-01T00:00:02Z",
}
const PROGRESS = {
  overall_percent: 40,
  weighted_percent: 40,
  completed_nodes: 1,
  total_nodes: 2,
  running_nodes: [
    { node_id: "soften", index: [], backend_id: "worker:gpu-7", progress: 0.5, current_step: "4 of 8" },
  ],
}
const RUN = {
  id: "r",
  status: "running",
  questions: [],
  nodes: [
    { id: "draw", type: "workflow", status: "done", expected: 1, done: 1, ...NODE },
    { id: "soften", type: "workflow", status: "running", expected: 1, done: 0, ...NODE },
  ],
  executions: [EXECUTION],
  progress: PROGRESS,
} as unknown as GraphRunAnswer
const urls = new SteadyUrls()

describe("a run", () => {
  it("is shown on its nodes", () => {
    const runs = nodeRuns(RUN, urls.of)
    expect(runs.get("draw")).toMatchObject({ status: "done", pictures: ["/f?1"], seconds: 2 })
    expect(runs.get("soften")).toMatchObject({ progress: 0.5, step: "4 of 8", backend: "worker:gpu-7" })
  })

  it("shows a preview only while a node is running", () => {
    const previews = new Map([
      ["soften", "data:1"],
      ["draw", "data:2"],
    ])
    const runs = nodeRuns(RUN, urls.of, previews)
    expect(runs.get("soften")?.pictures).toEqual(["data:1"])
    expect(runs.get("draw")?.pictures).toEqual(["/f?1"])
  })

  it("is updated by its events, and results are requested when an execution ends", () => {
    const nodes = RUN.nodes.map((node) => ({ ...node, status: "done" as const, done: 1 }))
    const event = { ...PROGRESS, overall_percent: 100, run_id: "r", nodes, questions: [], error: null }
    const next = withEvent(RUN, { ...event, status: "completed" })
    expect(next.progress.overall_percent).toBe(100)
    expect(next.executions).toBe(RUN.executions)
    expect(stampOf(next)).not.toBe(stampOf(RUN))
    expect(stampOf({ ...RUN, progress: next.progress } as GraphRunAnswer)).toBe(stampOf(RUN))
  })

  it("shows a node that asks a question", () => {
    const questions = [
      {
        node: "soften",
        index: [],
        message: "m",
        backends: [],
        choices: [],
        deadline: null,
        pick_from: null,
        price_tokens: 2,
      },
    ]
    expect(nodeRuns({ ...RUN, questions }, urls.of).get("soften")?.status).toBe("asking")
  })

  it("contains each file once, and a picture keeps its URL", () => {
    expect(filesIn(EXECUTION.outputs)).toEqual([FILE])
    expect(urls.of({ ...FILE, url: "/f?2" })).toBe("/f?1")
    expect(urls.of({ ...FILE, file_id: "f2", small_url: "/small" })).toBe("/small")
  })

  it("reuses an answer only if the question accepts it", () => {
    const question = { node: "a", index: [], message: "", backends: ["worker:b"], choices: ["backend"] }
    const typed = question as unknown as Parameters<typeof sameAnswer>[0]
    expect(sameAnswer(typed, { choice: "backend", backend: "worker:b" })).not.toBeNull()
    expect(sameAnswer(typed, { choice: "backend", backend: "worker:c" })).toBeNull()
    expect(sameAnswer(typed, { choice: "skip", backend: null })).toBeNull()
  })
})
