/** Caches the latest data by address. Old data stays available while new data is loading. */

import { type ApiError, asApiError } from "./errors"

export interface Entry<T = unknown> {
  readonly data: T | undefined
  readonly error: ApiError | null
  readonly isLoading: boolean
  /** The time of the last read, from performance.now(). 0 means never. */
  readonly readAt: number
}

export type Read<T> = (signal: AbortSignal) => Promise<T>

const EMPTY: Entry = { data: undefined, error: null, isLoading: false, readAt: 0 }
const ENTRIES_MAX = 200
const PRIMED_MS = 5_000
const BACKOFF_SECONDS = [1, 2, 4, 8, 15, 30]

interface Slot {
  entry: Entry
  read: Read<unknown> | null
  abort: AbortController | null
  listeners: Set<() => void>
  failures: number
  retry: ReturnType<typeof setTimeout> | null
  /** Data that was read ahead counts as fresh until this time, from performance.now(). */
  primedUntil: number
}

export class Cache {
  private readonly slots = new Map<string, Slot>()
  private readonly whenCleared = new Set<() => void>()

  entry<T>(key: string): Entry<T> {
    return (this.slots.get(key)?.entry ?? EMPTY) as Entry<T>
  }

  /** Adds a listener to a key, and reads the data unless it was read less than `freshSeconds`
   * ago. */
  watch<T>(key: string, read: Read<T>, listener: () => void, freshSeconds = 0): () => void {
    const slot = this.slot(key)
    slot.read = read
    slot.listeners.add(listener)
    const age = (performance.now() - slot.entry.readAt) / 1000
    const isPrimed = performance.now() < slot.primedUntil
    slot.primedUntil = 0
    const isFresh = slot.entry.readAt > 0 && (age < freshSeconds || isPrimed)
    if (!slot.entry.isLoading && !isFresh) void this.reload(key)
    return () => {
      slot.listeners.delete(listener)
      if (slot.listeners.size === 0) this.stop(slot)
      this.trim()
    }
  }

  /** Reads data once before it has listeners. A listener that is added shortly afterwards uses
   * this data. */
  async prime<T>(key: string, read: Read<T>): Promise<void> {
    const slot = this.slot(key)
    if (slot.listeners.size > 0 || slot.entry.isLoading || slot.entry.readAt > 0) return
    slot.read = read
    slot.primedUntil = performance.now() + PRIMED_MS
    await this.reload(key)
    if (slot.listeners.size === 0) this.stop(slot)
  }

  async reload(key: string): Promise<void> {
    const slot = this.slots.get(key)
    if (!slot?.read) return
    this.stop(slot)
    const abort = new AbortController()
    slot.abort = abort
    this.put(slot, { ...slot.entry, isLoading: true })
    try {
      const data = await slot.read(abort.signal)
      if (abort.signal.aborted) return
      slot.failures = 0
      this.put(slot, { data, error: null, isLoading: false, readAt: performance.now() })
    } catch (thrown) {
      if (abort.signal.aborted) return
      const error = asApiError(thrown)
      this.put(slot, { ...slot.entry, error, isLoading: false })
      if (error.isTemporary) this.retryLater(key, slot, error)
    }
  }

  /** Marks all keys with the prefix as outdated. Keys with listeners are read again immediately,
   * and the others as soon as they get a listener. */
  invalidate(prefix: string): void {
    for (const [key, slot] of this.slots) {
      if (!key.startsWith(prefix)) continue
      slot.entry = { ...slot.entry, readAt: 0 }
      if (slot.listeners.size > 0) void this.reload(key)
    }
  }

  /** Stores data from another source, such as an event or the response to a change. */
  set<T>(key: string, change: (data: T | undefined) => T | undefined): void {
    const slot = this.slot(key)
    const data = change(slot.entry.data as T | undefined)
    this.put(slot, { ...slot.entry, data, readAt: performance.now() })
  }

  /** Reads all keys with listeners again, because the network or the user is back. */
  wake(): void {
    for (const [key, slot] of this.slots) if (slot.listeners.size > 0) void this.reload(key)
  }

  /** Adds a listener that is called when the cache is cleared, so that data stored elsewhere is
   * removed before another user signs in. */
  onClear(listener: () => void): void {
    this.whenCleared.add(listener)
  }

  clear(): void {
    for (const listener of this.whenCleared) listener()
    for (const [key, slot] of this.slots) {
      this.stop(slot)
      this.put(slot, EMPTY)
      if (slot.listeners.size === 0) this.slots.delete(key)
    }
  }

  private retryLater(key: string, slot: Slot, error: ApiError): void {
    const delay = BACKOFF_SECONDS[Math.min(slot.failures, BACKOFF_SECONDS.length - 1)] ?? 30
    slot.failures += 1
    const seconds = Math.max(error.retryAfterSeconds ?? 0, delay)
    slot.retry = setTimeout(() => void this.reload(key), seconds * 1000)
  }

  private slot(key: string): Slot {
    let slot = this.slots.get(key)
    if (!slot) {
      slot = {
        entry: EMPTY,
        read: null,
        abort: null,
        listeners: new Set(),
        failures: 0,
        retry: null,
        primedUntil: 0,
      }
      this.slots.set(key, slot)
    }
    return slot
  }

  private put(slot: Slot, entry: Entry): void {
    slot.entry = entry
    for (const listener of slot.listeners) listener()
  }

  private stop(slot: Slot): void {
    slot.abort?.abort()
    slot.abort = null
    if (slot.retry) clearTimeout(slot.retry)
    slot.retry = null
    if (slot.entry.isLoading) slot.entry = { ...slot.entry, isLoading: false }
  }

  private trim(): void {
    for (const [key, slot] of this.slots) {
      if (this.slots.size <= ENTRIES_MAX) return
      if (slot.listeners.size === 0) this.slots.delete(key)
    }
  }
}

export const cache = new Cache()
