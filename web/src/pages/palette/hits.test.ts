import { expect, test } from "vitest"
import { actsOn, customerHits, operatorHits, orderedHits, placesAndActs, runsNamed } from "./hits"

const JOB = "6a1f0b5c-0000-4000-8000-000000000000"
const FOUND = {
  effects: [{ id: "1", slug: "soften", title: "Softened photo" }],
  media: [{ id: "2", kind: "image", filename: null, created_at: "" }],
  jobs: [{ id: JOB, status: "failed", effect_id: "1", video_id: null, submitted_at: "" }],
}

test("customers' results link to their pages", () => {
  const things = customerHits(FOUND, new Map([["1", { title: "Softened photo" }]]))
  expect(things.map((hit) => [hit.href, hit.label])).toEqual([
    ["/effects/soften", "Softened photo"],
    ["/media/2", "Untitled"],
    [`/results/${JOB}`, "Softened photo, 6a1f0b5c"],
  ])
})

test("operators' results link into the console", () => {
  const things = operatorHits({
    found: [
      { kind: "worker", id: "w1", name: "gpu-05", detail: "online" },
      { kind: "effect", id: "a b", name: "A b", detail: "active" },
    ],
  })
  expect(things.map((hit) => hit.href)).toEqual(["/console/workers/w1", "/console/effects/a%20b"])
  expect(actsOn(things[0] ?? ({} as never)).map((hit) => hit.act)).toEqual(["drain", "copy"])
})

test("users only get links to pages that they may open", () => {
  expect(placesAndActs("", [], false).some((hit) => hit.href === "/wallet")).toBe(false)
  expect(placesAndActs("", ["customer"], false).some((hit) => hit.href === "/console")).toBe(false)
  expect(placesAndActs("wor", ["operator"], true).map((hit) => hit.href)).toEqual([
    "/console/workers",
    "/console/workflows",
  ])
})

test("results come first, then actions on the first result, then pages", () => {
  const things = customerHits(FOUND, new Map())
  const groups = orderedHits(things, placesAndActs("", ["customer"], false), "").map((hit) => hit.group)
  expect([...new Set(groups)]).toEqual(["things", "acts", "places"])
  expect(
    orderedHits([], placesAndActs("", ["customer"], false), "").every((hit) => hit.group === "places"),
  ).toBe(true)
})

test("runs are found by name and id, newest first", () => {
  const graph = {
    id: "7f00",
    graph_id: "g",
    name: "Two portraits",
    status: "waiting_for_user",
    created_at: "2026-01-01",
  }
  const pipeline = {
    id: "8f00",
    pipeline_id: "p",
    pipeline: "Portraits",
    status: "active",
    created_at: "2026-01-02",
  }
  const search = (text: string) => runsNamed(text, [graph as never], [pipeline as never])
  expect(search("por").map((hit) => hit.href)).toEqual(["/pipelines/p/runs/8f00", "/graphs/g/runs/7f00"])
  expect(search("7f").map((hit) => hit.note)).toEqual(["Graph run, waiting for user"])
  expect(search("cat")).toEqual([])
})
