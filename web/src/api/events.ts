/** Receives server-sent events through one connection per address and tab, which reconnects
 * automatically. */

import { useEffect, useRef } from "react"
import { ownPath } from "./client"
import { connection } from "./connection"
import { asApiError, errorOf } from "./errors"

export interface ServerEvent {
  /** The event's name, or "message" if the server sends none. */
  readonly event: string
  readonly data: string
  readonly id: string
}

export type Handler = (event: ServerEvent) => void

const BACKOFF_SECONDS = [1, 2, 4, 8, 15, 30]
/** The server sends a comment at least every 15 s, so a longer silence means that the connection
 * is lost. */
const SILENCE_MS_MAX = 45_000
/** A hidden tab closes its connection after this time, because a browser allows only six
 * connections per server. */
const HIDDEN_MS_MAX = 60_000
const LINE_CHARACTERS_MAX = 4_000_000

/** Parses a stream of server-sent events as it arrives. */
export class EventParser {
  private rest = ""
  private event = ""
  private data: string[] = []
  private readonly emit: Handler
  lastId = ""
  retryMs: number | null = null

  constructor(emit: Handler) {
    this.emit = emit
  }

  push(text: string): void {
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/)
    this.rest = lines.pop() ?? ""
    if (this.rest.length > LINE_CHARACTERS_MAX) throw new Error("an event is too large")
    for (const line of lines) this.line(line)
  }

  private line(line: string): void {
    if (line === "") {
      if (this.data.length > 0)
        this.emit({ event: this.event || "message", data: this.data.join("\n"), id: this.lastId })
      this.event = ""
      this.data = []
      return
    }
    const colon = line.indexOf(":")
    if (colon === 0) return
    const field = colon < 0 ? line : line.slice(0, colon)
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "")
    if (field === "event") this.event = value
    else if (field === "data") this.data.push(value)
    else if (field === "id") this.lastId = value
    else if (field === "retry" && /^\d+$/.test(value)) this.retryMs = Number(value)
  }
}

class Stream {
  readonly handlers = new Set<Handler>()
  private abort: AbortController | null = null
  private timer: ReturnType<typeof setTimeout> | null = null
  private failures = 0
  private lastId = ""
  private readonly path: string

  constructor(path: string) {
    this.path = path
  }

  open(): void {
    this.close()
    const abort = new AbortController()
    this.abort = abort
    void this.read(abort).then(
      () => this.reopen(abort),
      (thrown) => this.reopen(abort, asApiError(thrown)),
    )
  }

  close(): void {
    if (this.timer) clearTimeout(this.timer)
    this.timer = null
    this.abort?.abort()
    this.abort = null
  }

  private async read(abort: AbortController): Promise<void> {
    const headers: Record<string, string> = { accept: "text/event-stream" }
    if (this.lastId) headers["last-event-id"] = this.lastId
    const response = await fetch(ownPath(this.path), {
      headers,
      credentials: "same-origin",
      signal: abort.signal,
    })
    if (!response.ok || !response.body) throw await errorOf(response)
    this.failures = 0
    connection.back(this.path)
    const parser = new EventParser((event) => {
      this.lastId = event.id
      for (const handler of this.handlers) handler(event)
    })
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
    for (;;) {
      const silence = setTimeout(() => void reader.cancel(), SILENCE_MS_MAX)
      const { done, value } = await reader.read().finally(() => clearTimeout(silence))
      if (done) return
      parser.push(value)
    }
  }

  private reopen(abort: AbortController, error?: ReturnType<typeof asApiError>): void {
    if (abort.signal.aborted || this.abort !== abort) return
    if (error && !error.isTemporary) {
      connection.back(this.path)
      return
    }
    const delay = BACKOFF_SECONDS[Math.min(this.failures, BACKOFF_SECONDS.length - 1)] ?? 30
    const seconds = Math.max(error?.retryAfterSeconds ?? 0, delay)
    this.failures += 1
    // A server may close a stream from time to time, so only a second failure is reported.
    if (error || this.failures > 1) connection.lost(this.path, seconds, () => this.open())
    this.timer = setTimeout(() => this.open(), seconds * 1000)
  }
}

const streams = new Map<string, Stream>()

/** Adds a listener and returns a function that removes it. Listeners of the same address share
 * one connection. */
export function listen(path: string, handler: Handler): () => void {
  let stream = streams.get(path)
  if (!stream) {
    stream = new Stream(path)
    streams.set(path, stream)
    stream.open()
  }
  const open = stream
  open.handlers.add(handler)
  return () => {
    open.handlers.delete(handler)
    if (open.handlers.size > 0 || streams.get(path) !== open) return
    open.close()
    streams.delete(path)
    connection.back(path)
  }
}

/** Passes the events of a path to the component while it is mounted. Data is parsed as JSON. Does
 * nothing if the path is null. */
export function useEvents<T = unknown>(
  path: string | null,
  handle: (data: T, event: ServerEvent) => void,
): void {
  const latest = useRef(handle)
  latest.current = handle
  useEffect(() => {
    if (path === null) return undefined
    return listen(path, (event) => latest.current(parsed(event.data) as T, event))
  }, [path])
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text)
  } catch {
    return text
  }
}

/** Closes the streams of a hidden tab after a while, and reopens them when the tab becomes
 * visible. */
export function watchVisibility(): void {
  let timer: ReturnType<typeof setTimeout> | null = null
  let isPaused = false
  document.addEventListener("visibilitychange", () => {
    if (timer) clearTimeout(timer)
    timer = null
    if (document.visibilityState === "hidden") {
      timer = setTimeout(() => {
        isPaused = true
        for (const stream of streams.values()) stream.close()
      }, HIDDEN_MS_MAX)
    } else if (isPaused) {
      isPaused = false
      for (const stream of streams.values()) stream.open()
    }
  })
  window.addEventListener("online", () => connection.now())
}
