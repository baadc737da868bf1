/** Counts beside the words of the console's rail. Pages that know one put it here. */

import { useSyncExternalStore } from "react"

export interface Counts {
  queued?: number | undefined
  workers?: number | undefined
  /** Workers that want to join: a person is needed. */
  pending?: number | undefined
  fleets?: number | undefined
  workflows?: number | undefined
  effects?: number | undefined
  tenants?: number | undefined
}

let counts: Counts = {}
const listeners = new Set<() => void>()

export function putConsoleCounts(known: Counts): void {
  counts = { ...counts, ...known }
  for (const each of listeners) each()
}

export function useConsoleCounts(): Counts {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener)
      return () => listeners.delete(listener)
    },
    () => counts,
  )
}
