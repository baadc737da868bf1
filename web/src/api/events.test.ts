import { afterEach, expect, test, vi } from "vitest"
import { connection } from "./connection"
import { EventParser, listen, type ServerEvent } from "./events"

afterEach(() => {
  vi.useRealTimers()
  vi.unstubAllGlobals()
})

function parse(...pieces: string[]): ServerEvent[] {
  const found: ServerEvent[] = []
  const parser = new EventParser((event) => found.push(event))
  for (const piece of pieces) parser.push(piece)
  return found
}

test("an event may arrive in pieces that are cut anywhere", () => {
  const text = 'id: 7\nevent: progress\ndata: {"percent": 4}\n\n: still there\n\ndata: a\ndata: b\n\n'
  const expected = [
    { event: "progress", data: '{"percent": 4}', id: "7" },
    { event: "message", data: "a\nb", id: "7" },
  ]
  expect(parse(text)).toEqual(expected)
  expect(parse(...text)).toEqual(expected)
})

test("lines may end with carriage returns", () => {
  expect(parse("data: x\r", "\n\r\n")).toEqual([{ event: "message", data: "x", id: "" }])
})

test("an incomplete event is not emitted", () => {
  expect(parse("data: x\n")).toEqual([])
})

function streamOf(text: string, thenHangs: boolean): Response {
  const body = new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode(text))
      if (!thenHangs) controller.close()
    },
  })
  return new Response(body, { status: 200 })
}

test("a lost connection is reported and resumes after the last event", async () => {
  vi.useFakeTimers()
  const asked: (string | undefined)[] = []
  const answers = [
    () => streamOf("id: 3\ndata: 1\n\n", false),
    () => Promise.reject(new TypeError("network")),
    () => streamOf("id: 4\ndata: 2\n\n", true),
  ]
  vi.stubGlobal("fetch", (_path: string, { headers }: { headers: Record<string, string> }) => {
    asked.push(headers["last-event-id"])
    return Promise.resolve(answers[asked.length - 1]?.())
  })
  const found: string[] = []
  const stop = listen("/api/events", (event) => found.push(event.data))
  await vi.waitFor(() => expect(found).toEqual(["1"]))
  expect(connection.state()).toBeNull()
  await vi.advanceTimersByTimeAsync(1_000)
  await vi.waitFor(() => expect(connection.state()).not.toBeNull())
  connection.now()
  await vi.waitFor(() => expect(found).toEqual(["1", "2"]))
  expect(connection.state()).toBeNull()
  expect(asked).toEqual([undefined, "3", "3"])
  stop()
})

test("listeners of one address share one connection", async () => {
  const fetched = vi.fn(() => Promise.resolve(streamOf("data: 1\n\n", true)))
  vi.stubGlobal("fetch", fetched)
  const found: string[] = []
  const stops = ["a", "b"].map((name) => listen("/api/shared", () => found.push(name)))
  await vi.waitFor(() => expect(found).toEqual(["a", "b"]))
  expect(fetched).toHaveBeenCalledTimes(1)
  for (const stop of stops) stop()
})

test("a rejected connection is not retried", async () => {
  vi.useFakeTimers()
  const refused = vi.fn(() =>
    Promise.resolve(Response.json({ error: { code: "not_found", message: "" } }, { status: 404 })),
  )
  vi.stubGlobal("fetch", refused)
  const stop = listen("/api/gone", () => undefined)
  await vi.advanceTimersByTimeAsync(60_000)
  expect(refused).toHaveBeenCalledTimes(1)
  expect(connection.state()).toBeNull()
  stop()
})
