// @vitest-environment happy-dom
import { afterEach, expect, test, vi } from "vitest"
import { signOut } from "@/api"
import { dropDraft, noteDraft, notedDraft } from "./drafts"
import type { Chosen } from "./Media"

const MINE: Chosen = { name: "cat.png", size: 1, url: "blob:1", mediaId: "m1", upload: null }

afterEach(() => {
  sessionStorage.clear()
  vi.unstubAllGlobals()
})

test("what was typed, and files that are stored, are there after a reload", () => {
  const going = { ...MINE, mediaId: null, upload: { state: () => ({ mediaId: null }) } } as unknown as Chosen
  const done = { ...MINE, mediaId: null, upload: { state: () => ({ mediaId: "m2" }) } } as unknown as Chosen
  noteDraft("ada cartoon ", { chosen: { "": MINE, mask: done, other: going }, values: { text: "a cat" } })
  const expected = { media: { "": "m1", mask: "m2" }, values: { text: "a cat" } }
  expect(notedDraft("ada cartoon ")).toEqual(expected)
  expect(notedDraft("bob cartoon ")).toBeNull()
  dropDraft("ada cartoon ")
  expect(notedDraft("ada cartoon ")).toBeNull()
})

test("a few forms are kept, and none that is too long or that somebody has changed by hand", () => {
  for (const place of ["1", "2", "3", "4"]) noteDraft(place, { chosen: {}, values: { each: place } })
  expect(["1", "2", "3", "4"].map((place) => notedDraft(place) !== null)).toEqual([false, true, true, true])
  noteDraft("long", { chosen: {}, values: { text: "x".repeat(100_001) } })
  expect(notedDraft("long")).toBeNull()
  for (const wrong of ["{", "null", "[[1]]", '[["4", {"media": 0}]]']) {
    sessionStorage.setItem("comfyfleet.effect-drafts", wrong)
    expect(notedDraft("4")).toBeNull()
  }
})

test("nothing of it is left after a sign-out", async () => {
  noteDraft("ada cartoon ", { chosen: {}, values: { text: "private" } })
  vi.stubGlobal("fetch", () => Promise.resolve(new Response(null, { status: 204 })))
  await signOut()
  expect(Object.keys(sessionStorage)).toEqual([])
})
