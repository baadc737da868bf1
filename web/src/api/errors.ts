/** Errors of failed calls: errors that the API returned, and calls that got no response. */

export type Details = Record<string, unknown>

export class ApiError extends Error {
  readonly code: string
  readonly status: number
  readonly details: Details
  readonly retryAfterSeconds: number | null

  constructor(
    code: string,
    message: string,
    status: number,
    details: Details = {},
    retryAfter: number | null = null,
  ) {
    super(message)
    this.name = "ApiError"
    this.code = code
    this.status = status
    this.details = details
    this.retryAfterSeconds = retryAfter
  }

  /** True if the same call may succeed later without changes. */
  get isTemporary(): boolean {
    return this.status === 0 || this.status === 429 || this.status >= 500
  }

  get isOffline(): boolean {
    return this.status === 0
  }

  /** True if the user's own network was down. */
  get isOwnNetwork(): boolean {
    return this.isOffline && this.details.wasOnline === false
  }

  /** True if the requested item doesn't exist, or its id isn't valid. */
  get isMissing(): boolean {
    return this.status === 404 || this.status === 422
  }

  get isSignedOut(): boolean {
    return this.status === 401
  }
}

export function offline(): ApiError {
  const wasOnline = globalThis.navigator?.onLine !== false
  return new ApiError("offline", "the control plane can't be reached", 0, { wasOnline })
}

export async function errorOf(response: Response): Promise<ApiError> {
  const body = await response.json().catch(() => null)
  const error = (body as { error?: { code?: unknown; message?: unknown; details?: Details } } | null)?.error
  const code = typeof error?.code === "string" ? error.code : `http_${response.status}`
  const message = typeof error?.message === "string" ? error.message : response.statusText
  return new ApiError(code, message, response.status, error?.details ?? {}, retryAfterOf(response))
}

export function retryAfterOf(response: Response): number | null {
  const header = response.headers.get("retry-after")
  if (header === null) return null
  const seconds = Number(header)
  if (Number.isFinite(seconds)) return Math.max(0, seconds)
  const moment = Date.parse(header)
  return Number.isNaN(moment) ? null : Math.max(0, (moment - Date.now()) / 1000)
}

/** Converts any thrown value to an error that can be shown. */
export function asApiError(thrown: unknown): ApiError {
  if (thrown instanceof ApiError) return thrown
  if (thrown instanceof TypeError) return offline()
  return new ApiError("unexpected", thrown instanceof Error ? thrown.message : String(thrown), -1)
}
