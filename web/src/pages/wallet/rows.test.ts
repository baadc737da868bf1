import { expect, test } from "vitest"
import type { TransactionAnswer, TransactionType } from "@/api/schema"
import { byDay, dayTitle } from "@/ui/days"
import { csvOf, linesOf } from "./rows"

function transaction(
  id: number,
  type: TransactionType,
  amount: number,
  job: string | null,
): TransactionAnswer {
  return {
    id,
    type,
    amount,
    job_id: job,
    provider_transaction_id: null,
    effect_id: null,
    video_id: null,
    created_at: "2026-11-16T12:00:00Z",
  }
}

const ALL = [
  transaction(6, "JOB_RESERVE", -4, "c"),
  transaction(5, "JOB_REFUND", 12, "b"),
  transaction(4, "JOB_RESERVE", -12, "b"),
  transaction(3, "JOB_CONSUME", 0, "a"),
  transaction(2, "JOB_RESERVE", -3, "a"),
  transaction(1, "PAYMENT_CREDIT", 240, null),
]

test("reserved and consumed tokens form one line, with the balance", () => {
  const lines = linesOf(ALL, "all", 233, false)
  expect(lines.map((line) => [line.kind, line.amount, line.balance])).toEqual([
    ["held", -4, 233],
    ["back", 12, 237],
    ["held", -12, 225],
    ["spent", -3, 237],
    ["added", 240, 240],
  ])
  expect(lines.map((line) => line.isOver)).toEqual([false, true, true, true, false])
})

test("with a price per second, unused reserved tokens don't count as spent", () => {
  const metered = [transaction(2, "JOB_CONSUME", 20, "a"), transaction(1, "JOB_RESERVE", -90, "a")]
  expect(linesOf(metered, "spent", null, false).map((line) => line.amount)).toEqual([-70])
})

test("consumed tokens are left out until the page with their reservation is read", () => {
  const part = ALL.slice(0, 4)
  expect(linesOf(part, "spent", null, true)).toEqual([])
  expect(linesOf(part, "spent", null, false)).toHaveLength(1)
})

test("rows are grouped by day", () => {
  const days = byDay(
    ["2026-11-16T12:00:00", "2026-11-16T09:00:00", "2026-11-15T12:00:00"],
    (moment) => moment,
  )
  expect(days.map((day) => [day.key, day.rows.length])).toEqual([
    ["2026-11-16", 2],
    ["2026-11-15", 1],
  ])
  const now = new Date("2026-11-16T23:00:00")
  expect(days.map((day) => dayTitle(day.key, now))).toEqual(["Today", "Yesterday"])
})

test("CSV cells are quoted, and none is a formula", () => {
  expect(
    csvOf(
      ["a", "b"],
      [
        ['x"y,', "=1+1"],
        [-3, null],
      ],
    ),
  ).toBe('a,b\r\n"x""y,",\'=1+1\r\n-3,')
})
