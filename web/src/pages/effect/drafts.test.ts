// @vitest-environment happy-dom
import { afterEach, expect, test, vi } from "vitest"
import { signOut } from "@/api"
import { dropDraft, storeDraft, storedDraft } from "./drafts"
import type { Chosen } from "./Media"

const MINE: Chosen = { name: "cat.png", size: 1, url: "blob:1", mediaId: "m1", upload: null }

afterEach(() => {
  sessionStorage.clear()
  vi.unstubAllGlobals()
})

test("typed values and uploaded files survive a reload", () => {
  const going = { ...MINE, mediaId: null, upload: { state: () => ({ mediaId: null }) } } as unknown as Chosen
  const done = { ...MINE, mediaId: null, upload: { state: () => ({ mediaId: "m2" }) } } as unknown as Chosen
  storeDraft("ada cartoon ", { chosen: { "": MINE, mask: done, other: going }, values: { text: "a cat" } })
  const expected = { media: { "": "m1", mask: "m2" }, values: { text: "a cat" } }
  expect(storedDraft("ada cartoon ")).toEqual(expected)
  expect(storedDraft("bob cartoon ")).toBeNull()
  dropDraft("ada cartoon ")
  expect(storedDraft("ada cartoon ")).toBeNull()
})

test("only a few forms are kept, and none that are too long or have been tampered with", () => {
  for (const place of ["1", "2", "3", "4"]) storeDraft(place, { chosen: {}, values: { each: place } })
  expect(["1", "2", "3", "4"].map((place) => storedDraft(place) !== null)).toEqual([false, true, true, true])
  storeDraft("long", { chosen: {}, values: { text: "x".repeat(100_001) } })
  expect(storedDraft("long")).toBeNull()
  for (const wrong of ["{", "null", "[[1]]", '[["4", {"media": 0}]]']) {
    sessionStorage.setItem("comfyfleet.effect-drafts", wrong)
    expect(storedDraft("4")).toBeNull()
  }
})

test("nothing remains after a sign-out", async () => {
  storeDraft("ada cartoon ", { chosen: {}, values: { text: "private" } })
  vi.stubGlobal("fetch", () => Promise.resolve(new Response(null, { status: 204 })))
  await signOut()
  expect(Object.keys(sessionStorage)).toEqual([])
})
