import { expect, it } from "vitest"
import { includesRole } from "./session"

it("gives owners the operator's permissions and customers none", () => {
  expect(includesRole("owner", "operator")).toBe(true)
  expect(includesRole("operator", "owner")).toBe(false)
  expect(includesRole("viewer", "operator")).toBe(false)
  expect(includesRole(null, "viewer")).toBe(false)
})
