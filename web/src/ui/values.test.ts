import { expect, test } from "vitest"
import { ApiError } from "@/api"
import { bytes, duration, tokens } from "./amounts"
import { shortId } from "./CopyId"
import { messageOf } from "./ErrorNote"
import { stateOf } from "./Status"
import { relativeTime } from "./Time"

test.each([
  [0.42, "0.4 s"],
  [12.4, "12 s"],
  [80, "1 min 20 s"],
  [120, "2 min"],
  [11_100, "3 h 5 min"],
  [200_000, "2 d 7 h"],
])("%d seconds are shown as %s", (seconds, text) => {
  expect(duration(seconds)).toBe(text)
})

test.each([
  [0, "0 B"],
  [999, "999 B"],
  [6_200_000, "6.2 MB"],
  [1e15, "1,000 TB"],
])("%d bytes are shown as %s", (size, text) => {
  expect(bytes(size)).toBe(text)
})

test("one token is one token", () => {
  expect([tokens(1), tokens(12), tokens(0)]).toEqual(["1 token", "12 tokens", "0 tokens"])
})

test("times are shown in the largest unit that fits", () => {
  const now = new Date("2031-05-01T12:00:00Z")
  const textAt = (moment: string) => relativeTime(new Date(moment), now)
  expect(textAt("2031-05-01T11:59:50Z")).toContain("10 sec")
  expect(textAt("2031-05-01T10:00:01Z")).toContain("1 hr")
  expect(textAt("2031-04-29T12:00:00Z")).toContain("2 days")
  expect(textAt("2031-05-01T12:05:00Z")).toContain("in 5 min")
  expect(textAt("2031-05-08T11:59:40Z")).toContain("in 7 days")
  expect(textAt("2031-05-01T12:59:58Z")).toContain("in 1 hr")
  expect(textAt("2031-05-02T11:59:50Z")).toBe("tomorrow")
  expect(textAt("2031-04-24T12:00:10Z")).toContain("6 days ago")
})

test("long ids are shortened", () => {
  expect(shortId("0190a1b2-7777-7000-8000-000000000000")).toBe("0190a1b2")
  expect(shortId("gpu-05")).toBe("gpu-05")
})

test("every status of the API has one of six states", () => {
  expect(["queued", "processing", "completed", "failed", "cancelled"].map(stateOf)).toEqual([
    "queued",
    "running",
    "succeeded",
    "failed",
    "cancelled",
  ])
})

test("a user who was offline sees that message even when the network is back", () => {
  const own = new ApiError("offline", "", 0, { wasOnline: false })
  expect(messageOf(own, false)).toBe("You're offline.")
  expect(messageOf(own, true)).toBe("You were offline. Try again.")
  const gone = new ApiError("offline", "", 0, { wasOnline: true })
  expect(messageOf(gone, true)).toBe("The service can't be reached.")
})
