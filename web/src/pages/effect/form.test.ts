import { expect, test } from "vitest"
import {
  colorText,
  colorValue,
  fieldsOf,
  fileMistake,
  initialValues,
  isSlider,
  mistakesOf,
  propertiesOf,
  randomSeed,
} from "./form"

const SCHEMA = {
  properties: {
    prompt: { title: "Prompt", "x-kind": "multiline", type: "string", maxLength: 10 },
    warmth: { title: "Warmth", "x-kind": "integer", type: "integer", minimum: 0, maximum: 100, default: 72 },
    width: { title: "Width", "x-kind": "integer", type: "integer", minimum: 16, maximum: 4096 },
    light: { title: "Light", "x-kind": "choice", enum: ["left", 2] },
    tint: { title: "Tint", "x-kind": "colour", type: "integer", default: 255 },
    seed: { title: "Seed", "x-kind": "seed", type: "integer", minimum: 5, maximum: 7 },
    keep: { title: "Keep", "x-kind": "boolean", type: "boolean" },
    other: { title: "Other", "x-kind": "something new" },
  },
  required: ["prompt"],
}
const FIELDS = fieldsOf(SCHEMA)
const field = (name: string) => {
  const field = FIELDS.find((field) => field.name === name)
  if (!field) throw new Error(name)
  return field
}

test("fields come in schema order with their defaults, and an unknown kind becomes a text field", () => {
  expect(FIELDS.map((field) => field.kind).join(" ")).toBe(
    "multiline integer integer choice colour seed boolean text",
  )
  expect(initialValues(FIELDS)).toMatchObject({ warmth: 72, keep: false, prompt: undefined })
})

test("a short range with a default is a slider, and other ranges are typed", () => {
  expect(isSlider(field("warmth"))).toBe(true)
  expect(isSlider(field("width"))).toBe(false)
})

test("mistakes are reported by field, and empty values aren't sent", () => {
  const values = { prompt: "", width: 4, warmth: 7.5, seed: undefined }
  expect(Object.keys(mistakesOf(FIELDS, values))).toEqual(["prompt", "warmth", "width"])
  expect(mistakesOf(FIELDS, { prompt: "longer than ten" })).toHaveProperty("prompt")
  expect(mistakesOf(FIELDS, { prompt: "a cat", width: 64 })).toEqual({})
  expect(propertiesOf(FIELDS, values)).toEqual({ width: 4, warmth: 7.5 })
})

test("a random seed is within its range", () => {
  expect(randomSeed(field("seed"), () => 0)).toBe(5)
  expect(randomSeed(field("seed"), () => 0.999)).toBe(7)
})

test("a color is a string or a number, depending on the effect", () => {
  expect(colorText(255)).toBe("#0000ff")
  expect(colorValue(field("tint"), "#0000ff")).toBe(255)
  expect(colorValue(field("other"), "#0000ff")).toBe("#0000ff")
})

test("a file's type and size are checked before the upload", () => {
  const takes = { kind: "image", media_types: [], max_bytes: 1_000_000 }
  expect(fileMistake({ type: "image/png", size: 10 }, takes)).toBeNull()
  expect(fileMistake({ type: "text/plain", size: 10 }, takes)).toContain("any image")
  expect(fileMistake({ type: "image/svg+xml", size: 10 }, takes)).not.toBeNull()
  expect(fileMistake({ type: "image/png", size: 2_000_000 }, takes)).toContain("2 MB")
  const jpeg = { ...takes, media_types: ["image/jpeg"] }
  expect(fileMistake({ type: "image/png", size: 10 }, jpeg)).toContain("JPEG")
})
