import { expect, it } from "vitest"
import { merged, touches } from "./pages"

const rows = (...ids: number[]) => ids.map((id) => ({ id }))

it("puts new rows before earlier rows", () => {
  expect(merged(rows(5, 4, 3), rows(4, 3, 2, 1), (row) => row.id)).toEqual(rows(5, 4, 3, 2, 1))
})

it("detects that rows between two reads were never read", () => {
  expect(touches(rows(6, 5, 4), rows(4, 3, 2))).toBe(true)
  expect(touches(rows(9, 8, 7), rows(4, 3, 2))).toBe(false)
})
