import { expect, test } from "vitest"
import type { AdminEffectAnswer, PropertyAnswer } from "@/api/schema"
import { words } from "@/words/en/effects"
import { bodyOf, customerProperties, faceOf, isChanged, mistakesOf, toggled } from "./face"

const EFFECT: AdminEffectAnswer = {
  id: "1",
  slug: "soften",
  workflow_slug: "soften",
  title: "Soft",
  description: "",
  preview_url: null,
  price_tokens: 3,
  overrides: { size: 256 },
  locked: ["prefix"],
  stage: "production",
  provider: "self_hosted",
  published: true,
  max_upload_bytes: 2_500_000,
  media_types: ["image/png"],
  keep_metadata: false,
  reuse: false,
  tags: ["portrait", "soft"],
  examples: [],
  last_processing_time_seconds: null,
  typical_seconds: null,
  created_at: "2026-01-01T00:00:00Z",
}

function property(name: string, type: PropertyAnswer["type"] = "text"): PropertyAnswer {
  return {
    name,
    type,
    binding: `1.${name}`,
    placeholder: null,
    default: null,
    minimum: null,
    maximum: null,
    step: null,
    choices: null,
    required: false,
    description: "",
    label: null,
    format: null,
  }
}

test("untouched settings aren't changed", () => {
  expect(isChanged(faceOf(EFFECT), EFFECT)).toBe(false)
  expect(isChanged({ ...faceOf(EFFECT), price: "4" }, EFFECT)).toBe(true)
  expect(isChanged({ ...faceOf(EFFECT), locked: [] }, EFFECT)).toBe(true)
})

test("typed values are converted to the request", () => {
  const face = { ...faceOf(EFFECT), tags: "Night, , night,soft", upload: "", overrides: { size: null, a: 1 } }
  expect(bodyOf(face)).toMatchObject({
    tags: ["night", "soft"],
    max_upload_bytes: null,
    price_tokens: 3,
    overrides: { a: 1 },
  })
  expect(bodyOf(faceOf(EFFECT)).max_upload_bytes).toBe(2_500_000)
})

test("mistakes are reported before anything is sent", () => {
  const face = faceOf(EFFECT)
  expect(mistakesOf(face)).toEqual({})
  expect(mistakesOf({ ...face, title: " ", price: "1.5", upload: "0" })).toEqual({
    title: words.nameMissing,
    price: words.badPrice,
    upload: words.badUpload,
  })
  expect(mistakesOf({ ...face, price: "" }).price).toBe(words.badPrice)
})

test("customers can set neither the main file nor fixed values", () => {
  const all = [property("input", "image"), property("prefix"), property("size", "integer")]
  expect(customerProperties(all, faceOf(EFFECT)).map((property) => property.name)).toEqual(["size"])
  expect(toggled(["a"], "b")).toEqual(["a", "b"])
  expect(toggled(["a", "b"], "a")).toEqual(["b"])
})
