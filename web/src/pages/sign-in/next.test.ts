import { expect, test } from "vitest"
import { pageAfterSignIn } from "./next"

test("one goes on to the page that asked for a sign-in", () => {
  expect(pageAfterSignIn("/console/jobs?state=failed", ["operator"])).toBe("/console/jobs?state=failed")
})

test("operators go to the console, all others to the effects", () => {
  expect(pageAfterSignIn(null, ["operator"])).toBe("/console")
  expect(pageAfterSignIn(null, ["operator", "customer"])).toBe("/")
  expect(pageAfterSignIn(null, ["customer"])).toBe("/")
})

test.each([
  "https://evil.example/",
  "//evil.example/",
  "/\\evil.example",
  "/.//evil.example",
  "/a/..//evil.example",
  "/%2e//evil.example",
  "javascript:alert(1)",
  "/sign-in?next=/",
  "%",
])("%s is not gone to", (next) => {
  expect(pageAfterSignIn(next, [])).toBe("/")
})
