import { describe, expect, it } from "vitest"
import { cronOf, inputOf, inWords, momentIn, type Rhythm } from "./cron"

function cronFor(rhythm: Rhythm) {
  return cronOf({ rhythm, time: "02:30", day: "WED" })
}

describe("a schedule", () => {
  it("is built from a few choices", () => {
    expect(cronFor("hourly")).toBe("30 * * * *")
    expect(cronFor("daily")).toBe("30 2 * * *")
    expect(cronFor("weekdays")).toBe("30 2 * * MON-FRI")
    expect(cronFor("weekly")).toBe("30 2 * * WED")
    expect(cronFor("monthly")).toBe("30 2 1 * *")
    expect(cronFor("own")).toBeNull()
  })

  it("is described in words, or shown as written", () => {
    expect(inWords("30 2 * * *")).toBe("every day at 02:30")
    expect(inWords("5 * * * *")).toBe("every hour at :05")
    expect(inWords("*/15 * * * *")).toBe("every 15 minutes")
    expect(inWords("*/15 * * * MON-FRI")).toBe("every 15 minutes, on weekdays")
    expect(inWords("0 */6 * * *")).toBe("every 6 hours at :00")
    expect(inWords("0 9,17 * * 1-5")).toBe("on weekdays at 09:00, 17:00")
    expect(inWords("0 9 * * mon,0")).toBe("on Monday, Sunday at 09:00")
    expect(inWords("0 9 1 * *")).toBe("on day 1 of the month at 09:00")
    expect(inWords("0 9 L * *")).toBe("on the last day of the month at 09:00")
    for (const special of ["0 9 * 5 *", "1-5 9 * * *", "0 9 1 * MON", "0 9 * * FRI#2", "x"])
      expect(inWords(special)).toBe(special)
  })

  it("has times in its time zone", () => {
    expect(momentIn("2026-01-05T23:30:00Z", "Europe/Berlin")).toBe("Tue 6 Jan, 00:30")
  })

  it("parses inputs as JSON or as text", () => {
    expect(inputOf("5")).toBe(5)
    expect(inputOf('["a"]')).toEqual(["a"])
    expect(inputOf("body.order.photo?")).toBe("body.order.photo?")
  })
})
