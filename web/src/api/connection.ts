/** Whether the server can be reached, for the notice below the top bar. */

import { useSyncExternalStore } from "react"

export interface Lost {
  /** When it is tried again, as Date.now() counts. */
  readonly retryAt: number
}

type Retry = () => void

export class Connection {
  private readonly broken = new Map<string, { retryAt: number; retry: Retry }>()
  private readonly listeners = new Set<() => void>()
  private current: Lost | null = null

  lost(name: string, seconds: number, retry: Retry): void {
    this.broken.set(name, { retryAt: Date.now() + seconds * 1000, retry })
    this.tell()
  }

  back(name: string): void {
    if (this.broken.delete(name)) this.tell()
  }

  /** Tries everything again at once. */
  now(): void {
    for (const { retry } of [...this.broken.values()]) retry()
  }

  state = (): Lost | null => this.current

  subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener)
    return () => this.listeners.delete(listener)
  }

  private tell(): void {
    const moments = [...this.broken.values()].map((each) => each.retryAt)
    this.current = moments.length > 0 ? { retryAt: Math.min(...moments) } : null
    for (const each of this.listeners) each()
  }
}

export const connection = new Connection()

function onNetwork(listener: () => void): () => void {
  window.addEventListener("online", listener)
  window.addEventListener("offline", listener)
  return () => {
    window.removeEventListener("online", listener)
    window.removeEventListener("offline", listener)
  }
}

/** Whether the reader's machine has a network, as far as the browser knows. */
export function useOnline(): boolean {
  return useSyncExternalStore(onNetwork, () => navigator.onLine)
}
