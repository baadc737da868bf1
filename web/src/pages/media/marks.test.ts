import { expect, test } from "vitest"
import { Marks } from "./marks"

function storage(items: Record<string, string> = {}) {
  return {
    kept: items,
    getItem: (key: string) => items[key] ?? null,
    setItem: (key: string, value: string) => {
      items[key] = value
    },
  }
}

test("marks are kept for each user, and can be removed", () => {
  const store = storage()
  const marks = new Marks("ada", store)
  marks.toggle("1")
  marks.toggle("2")
  marks.toggle("1")
  expect(new Marks("ada", store).all()).toEqual(["2"])
  expect(new Marks("grace", store).all()).toEqual([])
})

test("invalid stored marks are ignored", () => {
  for (const text of ["{", "{}", "[1, null]"])
    expect(new Marks("ada", storage({ "comfyfleet-marks-ada": text })).all()).toEqual([])
  const full = {
    getItem: () => null,
    setItem: () => {
      throw new Error("full")
    },
  }
  const marks = new Marks("ada", full)
  marks.toggle("1")
  expect(marks.all()).toEqual(["1"])
})

test("the number of marks is limited", () => {
  const marks = new Marks("ada", storage())
  for (let number = 0; number < 1100; number += 1) marks.toggle(String(number))
  expect(marks.all()).toHaveLength(1000)
  expect(marks.all()[0]).toBe("1099")
})
