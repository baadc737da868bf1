import { expect, test } from "vitest"
import { Marks } from "./marks"

function storage(kept: Record<string, string> = {}) {
  return {
    kept,
    getItem: (key: string) => kept[key] ?? null,
    setItem: (key: string, value: string) => {
      kept[key] = value
    },
  }
}

test("marks are kept for each user, and can be taken off", () => {
  const store = storage()
  const marks = new Marks("ada", store)
  marks.toggle("1")
  marks.toggle("2")
  marks.toggle("1")
  expect(new Marks("ada", store).all()).toEqual(["2"])
  expect(new Marks("grace", store).all()).toEqual([])
})

test("whatever the storage holds, there are marks", () => {
  for (const kept of ["{", "{}", "[1, null]"])
    expect(new Marks("ada", storage({ "comfyfleet-marks-ada": kept })).all()).toEqual([])
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

test("they do not grow without end", () => {
  const marks = new Marks("ada", storage())
  for (let each = 0; each < 1100; each += 1) marks.toggle(String(each))
  expect(marks.all()).toHaveLength(1000)
  expect(marks.all()[0]).toBe("1099")
})
