/** Uploads a file directly to the store in parts. A lost connection pauses the upload, which
 * resumes automatically. */

import { ApiError, api, asApiError } from "@/api"
import type { Upload, UploadPart, UploadSlot, UploadState, Video } from "@/api/schema"

export type Phase = "sending" | "paused" | "linking" | "done" | "failed"

export interface Sent {
  readonly phase: Phase
  readonly sentBytes: number
  readonly mediaId: string | null
  readonly error: ApiError | null
}

/** The operations that an upload needs from the network and from timers. */
export interface Transport {
  announce: (file: File, effectId: string | null) => Promise<Upload>
  state: (fileId: string) => Promise<UploadState>
  put: (slot: UploadSlot, part: Blob, tell: (bytes: number) => void, signal: AbortSignal) => Promise<void>
  link: (fileId: string) => Promise<Video>
  /** Waits until the network may be available again, for at most this many seconds. */
  wait: (seconds: number, signal: AbortSignal) => Promise<void>
}

const PAUSE_SECONDS = [1, 2, 4, 8, 15]
/** The number of times that new URLs are requested after the store has refused expired ones. */
const REFUSED_MAX = 3

export class FileUpload {
  private sent: Sent = { phase: "sending", sentBytes: 0, mediaId: null, error: null }
  private readonly listeners = new Set<() => void>()
  private readonly abort = new AbortController()
  private readonly file: File
  private readonly effectId: string | null
  private readonly transport: Transport
  private failures = 0
  private refusals = 0
  /** Resolves with the media's id, or with null if the upload failed or was stopped. */
  readonly ended: Promise<string | null>

  constructor(file: File, effectId: string | null, transport: Transport = BROWSER) {
    this.file = file
    this.effectId = effectId
    this.transport = transport
    this.ended = this.run()
  }

  state = (): Sent => this.sent

  subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener)
    return () => this.listeners.delete(listener)
  }

  stop(): void {
    this.abort.abort()
  }

  private async run(): Promise<string | null> {
    try {
      const upload = await this.again(() => this.transport.announce(this.file, this.effectId))
      await this.sendAll(upload.file_id, upload.parts)
      this.put({ phase: "linking", sentBytes: this.file.size })
      const media = await this.again(() => this.transport.link(upload.file_id))
      this.put({ phase: "done", mediaId: media.id })
      return media.id
    } catch (thrown) {
      if (!this.abort.signal.aborted) this.put({ phase: "failed", error: asApiError(thrown) })
      return null
    }
  }

  private async sendAll(fileId: string, first: readonly UploadPart[]): Promise<void> {
    let parts = first
    for (;;) {
      const missing = parts.filter((part) => part.upload)
      if (missing.length === 0) return
      try {
        await this.sendSome(parts, missing)
        return
      } catch (thrown) {
        await this.pauseAfter(thrown)
        parts = (await this.again(() => this.transport.state(fileId))).parts
      }
    }
  }

  private async sendSome(parts: readonly UploadPart[], missing: readonly UploadPart[]): Promise<void> {
    let before = parts.filter((part) => !part.upload).reduce((sum, part) => sum + part.size, 0)
    for (const part of missing) {
      const tell = (bytes: number) => this.put({ phase: "sending", sentBytes: before + bytes })
      const data = this.file.slice(part.start, part.start + part.size)
      tell(0)
      if (part.upload) await this.transport.put(part.upload, data, tell, this.abort.signal)
      before += part.size
      this.failures = this.refusals = 0
    }
  }

  /** Retries a call until it succeeds. A permanent error, or too many refusals by the store,
   * ends the retries. */
  private async again<T>(call: () => Promise<T>): Promise<T> {
    for (;;) {
      this.abort.signal.throwIfAborted()
      try {
        const answer = await call()
        this.failures = 0
        return answer
      } catch (thrown) {
        await this.pauseAfter(thrown)
      }
    }
  }

  private async pauseAfter(thrown: unknown): Promise<void> {
    this.abort.signal.throwIfAborted()
    const error = asApiError(thrown)
    if (error.code === "store_refused") this.refusals += 1
    const isOver = error.code === "store_refused" ? this.refusals > REFUSED_MAX : !error.isTemporary
    if (isOver) throw error
    this.put({ phase: "paused" })
    const pause = PAUSE_SECONDS[Math.min(this.failures, PAUSE_SECONDS.length - 1)] ?? 15
    this.failures += 1
    await this.transport.wait(Math.max(pause, error.retryAfterSeconds ?? 0), this.abort.signal)
    this.abort.signal.throwIfAborted()
  }

  private put(change: Partial<Sent>): void {
    this.sent = { ...this.sent, ...change }
    for (const listener of this.listeners) listener()
  }
}

const BROWSER: Transport = {
  announce: (file, effectId) =>
    api.post<Upload>("/api/videos/uploads", {
      filename: file.name.slice(0, 200) || "file",
      content_type: file.type,
      size: file.size,
      effect_id: effectId,
      in_parts: true,
    }),
  state: (fileId) => api.get<UploadState>(`/api/videos/uploads/${fileId}`),
  link: (fileId) => api.post<Video>("/api/videos", { file_id: fileId }),
  put: putByRequest,
  wait: waitForNetwork,
}

/** Uses XMLHttpRequest because fetch doesn't report upload progress. */
function putByRequest(
  slot: UploadSlot,
  part: Blob,
  tell: (bytes: number) => void,
  signal: AbortSignal,
): Promise<void> {
  return new Promise((done, fail) => {
    const request = new XMLHttpRequest()
    request.open(slot.method, slot.url)
    for (const [name, value] of Object.entries(slot.headers))
      if (!/^(content-length|host)$/i.test(name)) request.setRequestHeader(name, value)
    request.upload.onprogress = (event) => tell(event.loaded)
    request.onerror = () => fail(new ApiError("offline", "The file storage can't be reached.", 0))
    request.onabort = () => fail(new ApiError("stopped", "The upload was stopped.", -1))
    request.onload = () => {
      const { status } = request
      if (status >= 200 && status < 300) done()
      else if (status >= 500 || status === 429)
        fail(new ApiError("store", "The file storage is busy. Try again later.", status))
      else fail(new ApiError("store_refused", "The file storage rejected the file.", status))
    }
    signal.addEventListener("abort", () => request.abort(), { once: true })
    request.send(part)
  })
}

function waitForNetwork(seconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((done) => {
    const end = () => {
      clearTimeout(timer)
      window.removeEventListener("online", end)
      done()
    }
    const timer = setTimeout(end, seconds * 1000)
    window.addEventListener("online", end, { once: true })
    signal.addEventListener("abort", end, { once: true })
  })
}
