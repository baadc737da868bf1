import { expect, test } from "vitest"
import { pageAfterSignIn } from "./next"

test("after signing in, the user gets to the page that required it", () => {
  expect(pageAfterSignIn("/console/jobs?state=failed", ["operator"])).toBe("/console/jobs?state=failed")
})

test("operators get to the console, and all other users to the effects", () => {
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
