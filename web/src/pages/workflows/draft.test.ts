import { expect, test } from "vitest"
import type { PropertyAnswer, SuggestedProperty } from "@/api/schema"
import { words } from "@/words/en/workflows"
import {
  bodyOf,
  carriedOver,
  exposedOf,
  fieldOf,
  inputAt,
  isSlug,
  labelOf,
  mistakesOf,
  moved,
  slugOf,
} from "./draft"

const SIZE: SuggestedProperty = {
  name: "size",
  type: "integer",
  binding: "6.size",
  node_id: "6",
  node_title: "Fit",
  path: [],
  input: "size",
  value: 256,
  default: 256,
  minimum: 0,
  maximum: 16384,
  step: 1,
  choices: null,
  is_multiline: false,
  role: null,
}

const BEFORE: PropertyAnswer = {
  name: "size",
  type: "integer",
  binding: "6.size",
  placeholder: null,
  default: 128,
  minimum: 16,
  maximum: 512,
  step: null,
  choices: null,
  required: false,
  description: "",
  label: "Edge",
  format: null,
}

test("a range that equals the node's own isn't sent", () => {
  const exposed = exposedOf(SIZE)
  expect(bodyOf(exposed, SIZE)).toMatchObject({
    name: "size",
    binding: "6.size",
    default: 256,
    minimum: null,
    maximum: null,
    label: null,
  })
  expect(bodyOf({ ...exposed, maximum: 512, label: " Edge " }, SIZE)).toMatchObject({
    minimum: null,
    maximum: 512,
    label: "Edge",
  })
})

test("a used name gets a number, and long texts are entered in several lines", () => {
  const text = exposedOf({ ...SIZE, type: "text", is_multiline: true }, new Set(["size", "size_2"]))
  expect(text.name).toBe("size_3")
  expect(text.format).toBe("multiline")
  expect(exposedOf({ ...SIZE, type: "seed", maximum: 2 ** 64 }).maximum).toBeNull()
})

test("mistakes are reported for their property", () => {
  const one = exposedOf(SIZE)
  const two = { ...exposedOf(SIZE), key: "7.size" }
  expect(mistakesOf([one, two])).toEqual({ "7.size": words.sameName })
  expect(mistakesOf([{ ...one, name: "1st" }])).toEqual({ "6.size": words.badName })
  expect(mistakesOf([{ ...one, minimum: 9, maximum: 1 }])).toEqual({ "6.size": words.badRange })
  expect(mistakesOf([{ ...one, maximum: 100 }])).toEqual({ "6.size": words.outside })
})

test("a new version keeps properties whose inputs still exist, and lists the others", () => {
  const { kept, lost } = carriedOver([BEFORE, { ...BEFORE, name: "gone", binding: "9.x" }], [SIZE])
  expect(kept.map((property) => [property.name, property.label, property.maximum])).toEqual([
    ["size", "Edge", 512],
  ])
  expect(lost).toEqual(["gone"])
})

test("a file name becomes a slug", () => {
  expect(slugOf("Golden Hour (2).PNG")).toBe("golden-hour-2")
  expect(slugOf("Süße Größe.json")).toBe("su-e-gro-e")
  expect(isSlug(slugOf("__x.json"))).toBe(true)
  expect(isSlug("Big")).toBe(false)
  expect(isSlug("")).toBe(false)
})

test("a property is shown in the same way as to customers", () => {
  expect(labelOf({ label: null, name: "longer_size" })).toBe("Longer size")
  expect(fieldOf(BEFORE, 64)).toMatchObject({ label: "Edge", kind: "integer", initial: 64, maximum: 512 })
  expect(fieldOf({ ...BEFORE, default: null, required: true }).isRequired).toBe(true)
  expect(fieldOf({ ...BEFORE, format: "colour" }).kind).toBe("colour")
})

test("properties can be reordered", () => {
  expect(moved(["a", "b", "c"], 2, -1)).toEqual(["a", "c", "b"])
  expect(moved(["a", "b"], 1, 1)).toEqual(["a", "b"])
  expect(moved(["a", "b"], 0, -1)).toEqual(["a", "b"])
})

test("an address consists of a node and an input, whose name may contain dots", () => {
  expect(inputAt("2:20.resize_type.longer_size", 5)).toMatchObject({
    node_id: "2:20",
    input: "resize_type.longer_size",
    value: 5,
  })
})
