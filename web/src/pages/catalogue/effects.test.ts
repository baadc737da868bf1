import { expect, test } from "vitest"
import type { ExampleMedia } from "@/api/schema"
import { type Effect, fits, previewOf, tagsOf, withPreviewFirst } from "./effects"

function effect(fields: Partial<Effect>): Effect {
  return {
    id: "1",
    slug: "golden-hour",
    title: "Golden hour",
    description: "Low sun beside it.",
    preview_url: null,
    price_tokens: 12,
    typical_seconds: 8,
    last_processing_time_seconds: null,
    takes: null,
    properties: {},
    tags: [],
    examples: [],
    can_pay: true,
    ...fields,
  }
}

function media(url: string): ExampleMedia {
  return { url, content_type: "image/webp", size: 1, width: null, height: null }
}

test("every word must occur in the effect", () => {
  expect(fits(effect({}), "golden SUN", null)).toBe(true)
  expect(fits(effect({}), "golden moon", null)).toBe(false)
  expect(fits(effect({}), "", null)).toBe(true)
})

test("a tag leaves out effects without it", () => {
  expect(fits(effect({ tags: ["Light"] }), "", "Light")).toBe(true)
  expect(fits(effect({ tags: ["Print"] }), "", "Light")).toBe(false)
  expect(fits(effect({}), "", "Light")).toBe(false)
})

test("an effect without a preview is never shown larger", () => {
  const blank = effect({ title: "blank" })
  const seen = effect({ title: "seen", preview_url: "/a.png" })
  expect(withPreviewFirst([blank, blank, seen, blank], "")?.map((effect) => effect.title)).toEqual([
    "seen",
    ...Array(3).fill("blank"),
  ])
  expect(withPreviewFirst([blank, blank, blank, blank], "")).toBeNull()
  expect(withPreviewFirst([blank, seen, blank], "")).toBeNull()
})

test("tags are listed once, in order", () => {
  expect(tagsOf([effect({ tags: ["b", "a"] }), effect({ tags: ["a"] }), effect({})])).toEqual(["a", "b"])
})

test("a preview on another host is left out", () => {
  const origin = "http://fleet.example"
  expect(previewOf(effect({ preview_url: "https://elsewhere.example/a.png" }), origin)).toBeNull()
  expect(previewOf(effect({ preview_url: "//elsewhere.example/a.png" }), origin)).toBeNull()
  expect(previewOf(effect({ preview_url: "/objects/a.png" }), origin)?.after).toBe("/objects/a.png")
  expect(previewOf(effect({ preview_url: `${origin}/a.png` }), origin)?.after).toBe(`${origin}/a.png`)
})

test("an example comes before the single preview", () => {
  const shown = effect({
    preview_url: "/a.png",
    examples: [{ before: media("/b.png"), after: media("/c.png") }],
  })
  expect(previewOf(shown, "")).toEqual({ before: "/b.png", after: "/c.png", isVideo: false })
})

test("clips are shown as videos, never overlaid with a picture, and sound is never a preview", () => {
  const clip = { ...media("/c.mp4"), content_type: "video/mp4" }
  const of = (before: ExampleMedia, after: ExampleMedia) =>
    previewOf(effect({ examples: [{ before, after }] }), "")
  expect(of(clip, clip)).toEqual({ before: "/c.mp4", after: "/c.mp4", isVideo: true })
  expect(of(media("/b.png"), clip)).toEqual({ before: null, after: "/c.mp4", isVideo: true })
  expect(of(media("/b.png"), { ...media("/c.mp3"), content_type: "audio/mpeg" })).toBeNull()
})
