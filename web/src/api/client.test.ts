import { afterEach, expect, test, vi } from "vitest"
import { api, onSignedOut, ownPath, pathOf, setCsrf } from "./client"
import { ApiError } from "./errors"

afterEach(() => {
  vi.useRealTimers()
  vi.unstubAllGlobals()
  setCsrf(null)
})

function answers(...given: (() => Response)[]) {
  const fetched = vi.fn((_path: string, _request: RequestInit) =>
    Promise.resolve(given[Math.min(fetched.mock.calls.length, given.length) - 1]?.() as Response),
  )
  vi.stubGlobal("fetch", fetched)
  return fetched
}

const refusal =
  (status: number, code: string, headers: Record<string, string> = {}) =>
  () =>
    Response.json({ error: { code, message: "reported", details: { field: "size" } } }, { status, headers })

test("empty values are left out of the query, lists are repeated", () => {
  expect(pathOf("/api/a", { q: "x y", tag: ["1", "2"], none: null, empty: "", zero: 0 })).toBe(
    "/api/a?q=x+y&tag=1&tag=2&zero=0",
  )
  expect(pathOf("/api/a", {})).toBe("/api/a")
})

test.each([
  "/api/videos/..\\..\\k\\key\\userdata\\a.json",
  "/api/graph-runs/../admin/maintenance",
  "/api/graph-runs/%2e%2E/admin",
  "/api/graph-runs/.%2e/admin?x=1",
  "/api/graph-runs/x/..",
  "/api/graph-runs/.\t./admin",
])("a path that a browser would lead elsewhere is not asked for: %s", async (path) => {
  const fetched = answers(() => Response.json({}))
  setCsrf("token")
  await expect(api.post(path)).rejects.toMatchObject({ status: 404 })
  await expect(api.get(path)).rejects.toMatchObject({ status: 404 })
  expect(fetched).not.toHaveBeenCalled()
})

test("names with dots and queries with dots are requested", () => {
  for (const path of ["/api/a/v1.2", "/api/a/...", "/api/a/.b", "/api/a?q=/../&b=%5C", "/api/a/%5C..%5C"])
    expect(ownPath(path)).toBe(path)
})

test("an error has the API's code, message and details", async () => {
  answers(refusal(422, "invalid_input"))
  const thrown = await api.post("/api/a", {}).catch((error: unknown) => error)
  expect(thrown).toBeInstanceOf(ApiError)
  expect(thrown).toMatchObject({
    status: 422,
    code: "invalid_input",
    message: "reported",
    details: { field: "size" },
  })
})

test("a missing response is an error", async () => {
  vi.stubGlobal("fetch", () => Promise.reject(new TypeError("network")))
  await expect(api.get("/api/a")).rejects.toMatchObject({ code: "offline", isTemporary: true })
})

test("changes send the session's token, reads do not", async () => {
  const fetched = answers(() => Response.json({}))
  setCsrf("secret")
  await api.get("/api/a")
  await api.delete("/api/a")
  const sent = fetched.mock.calls.map(
    ([, request]) => (request.headers as Record<string, string>)["x-csrf-token"],
  )
  expect(sent).toEqual([undefined, "secret"])
})

test("a read waits for the Retry-After time, and a change is never retried", async () => {
  vi.useFakeTimers()
  const fetched = answers(refusal(429, "too_many_calls", { "retry-after": "2" }), () =>
    Response.json({ a: 1 }),
  )
  const reading = api.get("/api/a")
  await vi.advanceTimersByTimeAsync(1_900)
  expect(fetched).toHaveBeenCalledTimes(1)
  await vi.advanceTimersByTimeAsync(200)
  await expect(reading).resolves.toEqual({ a: 1 })
  const again = answers(refusal(429, "too_many_calls", { "retry-after": "2" }))
  await expect(api.post("/api/a")).rejects.toMatchObject({ retryAfterSeconds: 2 })
  expect(again).toHaveBeenCalledTimes(1)
})

test("an unavailable service is reported immediately, even with a short Retry-After", async () => {
  const fetched = answers(refusal(503, "unavailable", { "retry-after": "5" }))
  await expect(api.get("/api/a")).rejects.toMatchObject({ code: "unavailable", retryAfterSeconds: 5 })
  expect(fetched).toHaveBeenCalledTimes(1)
})

test("a 401 signals the sign-out, except for the session request itself", async () => {
  const noticed = vi.fn()
  const stop = onSignedOut(noticed)
  answers(refusal(401, "unauthenticated"))
  await api.get("/api/session").catch(() => undefined)
  expect(noticed).not.toHaveBeenCalled()
  await api.get("/api/wallet").catch(() => undefined)
  expect(noticed).toHaveBeenCalledTimes(1)
  stop()
})

test("a file is sent unchanged", async () => {
  const fetched = answers(() => Response.json({}))
  const file = new Blob(["bytes"], { type: "image/png" })
  await api.put("/api/a", file)
  const sent = fetched.mock.calls[0]?.[1]
  expect(sent?.body).toBe(file)
  expect(sent?.headers).toMatchObject({ "content-type": "image/png" })
  await api.post("/api/a", new Blob(["{}"]))
  expect(fetched.mock.calls[1]?.[1].headers).toMatchObject({ "content-type": "application/octet-stream" })
})
