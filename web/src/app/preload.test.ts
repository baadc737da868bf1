// @vitest-environment happy-dom
import { expect, test, vi } from "vitest"
import { findRoute, loadPointedAt, paramsOf } from "./preload"

test("addresses lead to their pages", () => {
  expect(paramsOf("/graphs/:id", "/graphs/a%20b")).toEqual({ id: "a b" })
  expect(paramsOf("/graphs/:id", "/graphs/a/")).toEqual({ id: "a" })
  expect(paramsOf("/graphs/:id", "/graphs")).toBeNull()
  expect(paramsOf("/graphs/:id", "/graphs/")).toBeNull()
  expect(findRoute("/")?.path).toBe("/")
  expect(findRoute("/graphs/g/runs/r")?.path).toBe("/graphs/:graph/runs/:id")
  expect(findRoute("/nowhere")).toBeUndefined()
})

test("large pages list their first requests", () => {
  const route = findRoute("/graph-runs/7")
  expect(route?.reads({ id: "7" })).toEqual([
    "/api/workflows",
    "/api/graph-runs/7?urls=true&document=true&executions=1000",
  ])
  expect(findRoute("/graphs/new")?.reads({ id: "new" })).toEqual(["/api/workflows"])
})

test("a page is loaded when its link is pointed at", () => {
  const route = findRoute("/graphs/7")
  if (!route) throw new Error("page not found")
  const load = vi.spyOn(route, "load").mockReturnValue(new Promise(() => undefined))
  document.body.innerHTML =
    '<a href="/graphs/7"><b>Seven</b></a><a href="https://example.com/graphs/7">other</a>'
  const stop = loadPointedAt()
  const [own, other] = document.querySelectorAll("a")
  other?.dispatchEvent(new Event("pointerover", { bubbles: true }))
  expect(load).not.toHaveBeenCalled()
  own?.firstElementChild?.dispatchEvent(new Event("pointerover", { bubbles: true }))
  own?.dispatchEvent(new Event("focusin", { bubbles: true }))
  expect(load).toHaveBeenCalledTimes(2)
  stop()
  load.mockRestore()
})
