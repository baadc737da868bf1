/** Reads data for components: `const jobs = useQuery<Jobs>("/api/ai-jobs", { query: { limit: 50
 * } })`. */

import { useCallback, useMemo, useRef, useSyncExternalStore } from "react"
import { cache, type Entry, type Read } from "./cache"
import { api, pathOf, type Query } from "./client"

export interface QueryResult<T> extends Entry<T> {
  /** The key in the cache: the path with its query. */
  readonly key: string | null
  /** True if there is nothing to show yet, neither data nor an error. */
  readonly isFirstLoad: boolean
  readonly reload: () => void
}

export interface QueryOptions<T> {
  query?: Query
  /** Data younger than this many seconds is shown without another read. */
  freshSeconds?: number
  /** Reads the data instead of a GET request to the path. */
  read?: Read<T>
}

const NOTHING: Entry<never> = { data: undefined, error: null, isLoading: false, readAt: 0 }

/** Reads a path, or nothing if it is null. Old data remains during another read and after an
 * error. */
export function useQuery<T>(path: string | null, options: QueryOptions<T> = {}): QueryResult<T> {
  const key = path === null ? null : pathOf(path, options.query)
  const latest = useRef(options)
  latest.current = options
  const subscribe = useCallback(
    (listener: () => void) => {
      if (key === null) return () => undefined
      const read: Read<T> = (signal) => latest.current.read?.(signal) ?? api.get<T>(key, { signal })
      return cache.watch(key, read, listener, latest.current.freshSeconds)
    },
    [key],
  )
  const entry = useSyncExternalStore(subscribe, () => (key === null ? NOTHING : cache.entry<T>(key)))
  // Keeps its identity as long as the key is the same, so that new data doesn't restart effects
  // that depend on it.
  const reload = useCallback(() => {
    if (key !== null) void cache.reload(key)
  }, [key])
  return useMemo(
    () => ({
      ...entry,
      key,
      isFirstLoad: key !== null && entry.data === undefined && entry.error === null,
      reload,
    }),
    [entry, key, reload],
  )
}

if (typeof window !== "undefined") {
  window.addEventListener("online", () => cache.wake())
}
