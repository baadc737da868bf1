/** Reads lists page by page. The first page is refreshed, and older pages are appended to it. */

import { useMemo, useState } from "react"
import { type Act, useAct } from "./act"
import { api, pathOf, type Query } from "./client"
import { type QueryResult, useQuery } from "./query"

export interface PageAnswer {
  /** The value of `before` (or `after`) for the next page. Null means that there are no more
   * pages. */
  next: string | number | null
}

interface Older<Row> {
  /** The key of the list's first page. */
  of: string
  rows: readonly Row[]
  next: PageAnswer["next"]
}

export interface Pages<Row, Answer> {
  first: QueryResult<Answer>
  /** Undefined while the rows are being loaded. */
  rows: readonly Row[] | undefined
  hasMore: boolean
  more: Act<[], void>
}

/** Returns the new rows, followed by the earlier rows that aren't among them. */
export function merged<Row>(
  fresh: readonly Row[],
  before: readonly Row[],
  keyOf: (row: Row) => unknown,
): Row[] {
  const freshKeys = new Set(fresh.map(keyOf))
  return [...fresh, ...before.filter((row) => !freshKeys.has(keyOf(row)))]
}

/** Checks whether the two lists overlap. If they don't, rows between them may never have been
 * read. */
export function touches<Row extends { id: unknown }>(fresh: readonly Row[], before: readonly Row[]): boolean {
  const ids = new Set(before.map((row) => row.id))
  return fresh.some((row) => ids.has(row.id))
}

export function usePages<Row extends { id: string | number }, Answer extends PageAnswer>(
  path: string | null,
  query: Query,
  rowsOf: (answer: Answer) => readonly Row[],
  cursor: "before" | "after" = "before",
): Pages<Row, Answer> {
  const first = useQuery<Answer>(path, { query })
  const [stored, setStored] = useState<Older<Row> | null>(null)
  const loaded = stored && stored.of === first.key ? stored : null
  // biome-ignore lint/correctness/useExhaustiveDependencies: rowsOf only picks a field of the answer
  const older = useMemo(
    () => (loaded && first.data && touches(rowsOf(first.data), loaded.rows) ? loaded : null),
    [first.data, loaded],
  )
  // biome-ignore lint/correctness/useExhaustiveDependencies: as above
  const rows = useMemo(
    () => first.data && merged(rowsOf(first.data), older?.rows ?? [], (row) => row.id),
    [first.data, older],
  )
  const next = older ? older.next : (first.data?.next ?? null)
  const more = useAct(async () => {
    if (!path || !first.key || next === null || !rows) return
    const answer = await api.get<Answer>(pathOf(path, { ...query, [cursor]: next }))
    setStored({ of: first.key, rows: merged(rows, rowsOf(answer), (row) => row.id), next: answer.next })
  })
  return { first, rows, hasMore: next !== null, more }
}
