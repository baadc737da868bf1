import { describe, expect, it } from "vitest"
import { isEmail, matching, stateOfTenant } from "./tenants"

const ADA = { id: "0197a1b2-0000-7000-8000-000000000001", name: "Ada's films" }
const BOB = { id: "0297a1b2-0000-7000-8000-000000000001", name: "Bob" }

describe("tenants", () => {
  it("are found by a part of their name or the start of their id", () => {
    expect(matching([ADA, BOB], " FILM ")).toEqual([ADA])
    expect(matching([ADA, BOB], "0297")).toEqual([BOB])
    expect(matching([ADA, BOB], "a1b2")).toEqual([])
    expect(matching([ADA, BOB], "  ")).toEqual([ADA, BOB])
  })
  it("are active until their deletion starts", () => {
    const at = "2026-01-01T00:00:00Z"
    expect(stateOfTenant({ erasing_at: null, erased_at: null })).toBe("active")
    expect(stateOfTenant({ erasing_at: at, erased_at: null })).toBe("erasing")
    expect(stateOfTenant({ erasing_at: at, erased_at: at })).toBe("erased")
  })
  it("have users with valid email addresses", () => {
    expect(isEmail("ada@example.com")).toBe(true)
    expect(["ada", "@a", "a b@c", ""].some(isEmail)).toBe(false)
  })
})
