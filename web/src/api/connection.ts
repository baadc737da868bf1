/** Tracks lost connections to the server for the notice below the top bar. */

import { useSyncExternalStore } from "react"

export interface Lost {
  /** The time of the next attempt, from Date.now(). */
  readonly retryAt: number
}

type Retry = () => void

export class Connection {
  private readonly broken = new Map<string, { retryAt: number; retry: Retry }>()
  private readonly listeners = new Set<() => void>()
  private current: Lost | null = null

  lost(name: string, seconds: number, retry: Retry): void {
    this.broken.set(name, { retryAt: Date.now() + seconds * 1000, retry })
    this.notify()
  }

  back(name: string): void {
    if (this.broken.delete(name)) this.notify()
  }

  /** Reconnects everything immediately. */
  now(): void {
    for (const { retry } of [...this.broken.values()]) retry()
  }

  state = (): Lost | null => this.current

  subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener)
    return () => this.listeners.delete(listener)
  }

  private notify(): void {
    const moments = [...this.broken.values()].map(({ retryAt }) => retryAt)
    this.current = moments.length > 0 ? { retryAt: Math.min(...moments) } : null
    for (const listener of this.listeners) listener()
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

/** Returns whether the browser reports a network connection. */
export function useOnline(): boolean {
  return useSyncExternalStore(onNetwork, () => navigator.onLine)
}
