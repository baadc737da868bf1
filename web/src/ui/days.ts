/** Groups rows by day in the user's time zone. */

import { words } from "@/words/en/common"

export interface Day<Row> {
  /** The date in the user's time zone, such as 2026-11-16. */
  key: string
  rows: Row[]
}

export function dayOf(moment: Date): string {
  const two = (value: number) => String(value).padStart(2, "0")
  return `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`
}

/** Groups rows by day. The rows must be sorted by time. */
export function byDay<Row>(rows: readonly Row[], at: (row: Row) => string): Day<Row>[] {
  const days: Day<Row>[] = []
  for (const row of rows) {
    const key = dayOf(new Date(at(row)))
    const last = days.at(-1)
    if (last?.key === key) last.rows.push(row)
    else days.push({ key, rows: [row] })
  }
  return days
}

/** Returns "Today", "Yesterday" or the date. */
export function dayTitle(key: string, now = new Date()): string {
  const before = new Date(now.getFullYear(), now.getMonth(), now.getDate() - 1)
  if (key === dayOf(now)) return words.today
  if (key === dayOf(before)) return words.yesterday
  return new Date(`${key}T12:00:00`).toLocaleDateString(undefined, { dateStyle: "long" })
}
