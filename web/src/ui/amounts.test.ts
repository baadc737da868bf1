import { expect, test } from "vitest"
import { count, tokens } from "./amounts"

test("a zero has no sign, even a negative zero", () => {
  const missing = 0 - 0
  expect(count(-missing)).toBe("0")
  expect(tokens(-missing)).not.toContain("-")
  expect(count(-1200)).toBe(`-${count(1200)}`)
})
