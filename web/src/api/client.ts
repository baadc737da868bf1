/** Calls the API with the session's cookie. */

import { ApiError, asApiError, errorOf } from "./errors"

export type Query = Record<string, string | number | boolean | null | undefined | readonly string[]>

export interface CallOptions {
  query?: Query
  signal?: AbortSignal
  headers?: Record<string, string>
  /** Identifies the action, so that a repeated request takes effect only once. */
  idempotencyKey?: string
}

export const SESSION = "/api/session"
export const CSRF_HEADER = "x-csrf-token"
const RETRIES_MAX = 2
const RETRY_SECONDS_MAX = 5

let csrf: string | null = null
const whenSignedOut = new Set<() => void>()

export function setCsrf(token: string | null): void {
  csrf = token
}

/** Adds a listener that is called when a response shows that the session has ended. */
export function onSignedOut(listener: () => void): () => void {
  whenSignedOut.add(listener)
  return () => whenSignedOut.delete(listener)
}

/** Appends the query to a path. Empty values are left out, and lists become repeated parameters. */
export function pathOf(path: string, query?: Query): string {
  const params = new URLSearchParams()
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value === null || value === undefined || value === "") continue
    if (typeof value === "object") for (const item of value) params.append(name, item)
    else params.set(name, String(value))
  }
  const text = params.toString()
  return text ? `${path}?${text}` : path
}

/** Matches characters that browsers remove from a path, and dot segments that they resolve, before
 * they send a request. */
const LEADS_ELSEWHERE = /[\\\t\n\r]|\/(?:\.|%2e){1,2}(?=\/|$)/i

/** Returns the path, or throws if the browser would request a different one. Paths contain ids
 * from the page's address, which may come from an untrusted link. */
export function ownPath(path: string): string {
  if (LEADS_ELSEWHERE.test(path.replace(/[?#].*/s, "")))
    throw new ApiError("not_found", "there is no such address", 404)
  return path
}

/** Sends files unchanged and all other bodies as JSON. */
async function call<T>(method: string, path: string, body: unknown, options: CallOptions = {}): Promise<T> {
  const headers: Record<string, string> = { accept: "application/json", ...options.headers }
  const isFile = body instanceof Blob
  if (isFile) headers["content-type"] = body.type || "application/octet-stream"
  else if (body !== undefined) headers["content-type"] = "application/json"
  if (method !== "GET" && csrf) headers[CSRF_HEADER] = csrf
  if (options.idempotencyKey) headers["idempotency-key"] = options.idempotencyKey
  const request: RequestInit = { method, headers, credentials: "same-origin", signal: options.signal ?? null }
  if (body !== undefined) request.body = isFile ? body : JSON.stringify(body)
  for (let retries = 0; ; retries += 1) {
    try {
      return await once<T>(pathOf(path, options.query), request)
    } catch (thrown) {
      if (options.signal?.aborted) throw thrown
      const error = asApiError(thrown)
      const wait = error.retryAfterSeconds
      // Retries only rate-limited calls. Other failures are shown immediately and retried later by
      // the cache.
      const mayWait = method === "GET" && error.status === 429 && retries < RETRIES_MAX
      if (!mayWait || wait === null || wait > RETRY_SECONDS_MAX) throw error
      await new Promise((done) => setTimeout(done, wait * 1000))
    }
  }
}

async function once<T>(address: string, request: RequestInit): Promise<T> {
  const response = await fetch(ownPath(address), request)
  if (!response.ok) {
    if (response.status === 401 && !address.startsWith(SESSION))
      for (const listener of whenSignedOut) listener()
    throw await errorOf(response)
  }
  if (response.status === 204 || response.headers.get("content-length") === "0") return undefined as T
  return (await response.json()) as T
}

export const api = {
  get: <T>(path: string, options?: CallOptions) => call<T>("GET", path, undefined, options),
  post: <T>(path: string, body?: unknown, options?: CallOptions) => call<T>("POST", path, body, options),
  put: <T>(path: string, body?: unknown, options?: CallOptions) => call<T>("PUT", path, body, options),
  patch: <T>(path: string, body?: unknown, options?: CallOptions) => call<T>("PATCH", path, body, options),
  delete: <T = void>(path: string, options?: CallOptions) => call<T>("DELETE", path, undefined, options),
}
