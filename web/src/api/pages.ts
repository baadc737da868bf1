/** Lists with several pages: the first page is refreshed, and older pages are appended to it. */

import { useMemo, useState } from "react"
import { type Act, useAct } from "./act"
import { api, pathOf, type Query } from "./client"
import { type QueryResult, useQuery } from "./query"

export interface PageAnswer {
  /** The value of `before` (or `after`) for the next page; null means that there are no more
   * pages. */
  next: string | number | null
}

interface Older<Row> {
  /** Identifies the list. */
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

/** Puts new rows first and earlier rows after them. */
export function merged<Row>(
  fresh: readonly Row[],
  before: readonly Row[],
  keyOf: (row: Row) => unknown,
): Row[] {
  const known = new Set(fresh.map(keyOf))
  return [...fresh, ...before.filter((each) => !known.has(keyOf(each)))]
}

/** Checks whether earlier rows continue where the fresh ones end. Otherwise some rows between
 * them were never read. */
export function touches<Row extends { id: unknown }>(fresh: readonly Row[], before: readonly Row[]): boolean {
  const known = new Set(before.map((each) => each.id))
  return fresh.some((each) => known.has(each.id))
}

export function usePages<Row extends { id: string | number }, Answer extends PageAnswer>(
  path: string | null,
  query: Query,
  rowsOf: (answer: Answer) => readonly Row[],
  cursor: "before" | "after" = "before",
): Pages<Row, Answer> {
  const first = useQuery<Answer>(path, { query })
  const [kept, setKept] = useState<Older<Row> | null>(null)
  const given = kept && kept.of === first.key ? kept : null
  // biome-ignore lint/correctness/useExhaustiveDependencies: rowsOf only picks a field of the answer
  const older = useMemo(
    () => (given && first.data && touches(rowsOf(first.data), given.rows) ? given : null),
    [first.data, given],
  )
  // biome-ignore lint/correctness/useExhaustiveDependencies: as above
  const rows = useMemo(
    () => first.data && merged(rowsOf(first.data), older?.rows ?? [], (each) => each.id),
    [first.data, older],
  )
  const next = older ? older.next : (first.data?.next ?? null)
  const more = useAct(async () => {
    if (!path || !first.key || next === null || !rows) return
    const answer = await api.get<Answer>(pathOf(path, { ...query, [cursor]: next }))
    setKept({ of: first.key, rows: merged(rows, rowsOf(answer), (each) => each.id), next: answer.next })
  })
  return { first, rows, hasMore: next !== null, more }
}
