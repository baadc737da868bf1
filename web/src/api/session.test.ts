import { expect, it } from "vitest"
import { includesRole } from "./session"

it("counts an owner as an operator, and a customer as nobody", () => {
  expect(includesRole("owner", "operator")).toBe(true)
  expect(includesRole("operator", "owner")).toBe(false)
  expect(includesRole("viewer", "operator")).toBe(false)
  expect(includesRole(null, "viewer")).toBe(false)
})
