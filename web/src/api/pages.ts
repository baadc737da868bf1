/** Lists that come in pages: the newest page is kept fresh, older ones are added behind it. */

import { useMemo, useState } from "react"
import { type Act, useAct } from "./act"
import { api, pathOf, type Query } from "./client"
import { type QueryResult, useQuery } from "./query"

export interface PageAnswer {
  /** What `before` (or `after`) of the next page is; null: no more. */
  next: string | number | null
}

interface Older<Row> {
  /** Of which list. */
  of: string
  rows: readonly Row[]
  next: PageAnswer["next"]
}

export interface Pages<Row, Answer> {
  first: QueryResult<Answer>
  /** undefined: on their way. */
  rows: readonly Row[] | undefined
  hasMore: boolean
  more: Act<[], void>
}

/** What is new stands first; what was read before stays behind it. */
export function merged<Row>(
  fresh: readonly Row[],
  before: readonly Row[],
  keyOf: (row: Row) => unknown,
): Row[] {
  const known = new Set(fresh.map(keyOf))
  return [...fresh, ...before.filter((each) => !known.has(keyOf(each)))]
}

/** Whether rows that were read before go on where fresh ones end; else some between them were never read. */
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
