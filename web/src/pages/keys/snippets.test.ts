import { expect, test } from "vitest"
import { type Language, snippet } from "./snippets"

const URL = "https://fleet.example"
const PHOTO = { id: "0b5c", slug: "soften", takes: { kind: "image" } }
const CLIP = { id: "0b5d", slug: "invert", takes: { kind: "video" } }
const NOTHING = { id: "0b5e", slug: "negative", takes: null }
const PROGRAMS: Language[] = ["curl", "python", "javascript"]

test.each(PROGRAMS)("%s uses the user's address and effect, and never contains a key", (language) => {
  const text = snippet(language, URL, NOTHING)
  expect(text).toContain(URL)
  expect(text).toMatch(/negative|0b5e/)
  expect(text).toContain("COMFYFLEET_KEY")
  expect(text).not.toMatch(/upload/)
})

test.each(PROGRAMS)("%s uploads the file that the effect takes", (language) => {
  expect(snippet(language, URL, PHOTO)).toContain("photo.png")
  expect(snippet(language, URL, CLIP)).toContain("clip.mp4")
})

test("the address for ComfyUI clients contains the key", () => {
  expect(snippet("comfyui", URL, NOTHING)).toContain(`${URL}/k/$COMFYFLEET_KEY`)
})
