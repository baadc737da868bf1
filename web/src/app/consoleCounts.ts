/** The counts in the console's navigation. Pages that know a count store it here. */

import { useSyncExternalStore } from "react"

export interface Counts {
  queued?: number | undefined
  workers?: number | undefined
  /** The number of workers that wait for an operator's approval. */
  pending?: number | undefined
  fleets?: number | undefined
  workflows?: number | undefined
  effects?: number | undefined
  tenants?: number | undefined
}

let counts: Counts = {}
const listeners = new Set<() => void>()

export function putConsoleCounts(changed: Counts): void {
  counts = { ...counts, ...changed }
  for (const listener of listeners) listener()
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
