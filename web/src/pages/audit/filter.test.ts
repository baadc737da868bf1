import { describe, expect, it } from "vitest"
import { actorOf, filterOf, inOneLine, placeOf, queryOf, searchOf } from "./filter"

const TENANT = "0197a1b2-0000-7000-8000-000000000001"

describe("the audit filter", () => {
  it("is kept in the address, without invalid values", () => {
    const filter = filterOf(`?actor=operator:ada&tenant=${TENANT}&span=1h&subject=&until=never&other=1`)
    expect(filter).toEqual({ actor: "operator:ada", tenant: TENANT, span: "1h" })
    expect(filterOf(`?${searchOf(filter)}`)).toEqual(filter)
    expect(filterOf("?tenant=ada&span=2h")).toEqual({})
  })
  it("requests a time range up to now, or exact times", () => {
    const now = new Date("2026-01-01T12:00:30Z")
    expect(queryOf({ span: "1h", until: "2020-01-01" }, now)).toMatchObject({
      since: "2026-01-01T11:00:00.000Z",
    })
    expect(queryOf({ span: "1h", until: "2020-01-01" }, now).until).toBeUndefined()
    const own = queryOf({ since: "2026-01-01T00:00:00Z", action: "credit" }, now)
    expect(own).toMatchObject({ since: "2026-01-01T00:00:00.000Z", action: "credit" })
  })
  it("accepts operators by name", () => {
    expect(actorOf(" Ada", ["ada", "bob"])).toBe("operator:ada")
    expect(actorOf("admin", ["ada"])).toBe("admin")
    expect(actorOf("worker:gpu-7", [])).toBe("worker:gpu-7")
    expect(actorOf("carl", ["ada"])).toBe("carl")
  })
  it("finds the page about an entry's subject", () => {
    expect(placeOf("job:1")).toBe("/console/jobs/1")
    expect(placeOf("worker:gpu/7")).toBe("/console/workers/gpu%2F7")
    expect(placeOf("control")).toBeNull()
    expect(placeOf("payment:x")).toBeNull()
  })
  it("formats details as one line", () => {
    expect(inOneLine({ amount: 5, reason: "a gift", scopes: ["read"] })).toBe(
      'amount: 5, reason: a gift, scopes: ["read"]',
    )
  })
})

it("inherited property names in an address aren't taken for time ranges", () => {
  expect(filterOf("span=constructor&since=__proto__")).toEqual({})
})
