import { expect, test } from "vitest"
import { type FleetPrompts, linesOf, termsOf, typedTerms } from "./prompts"

const TERMS: FleetPrompts = {
  is_open: true,
  price_tokens: 2,
  price_per_second: null,
  allow: ["VHS_*"],
  deny: ["LoadVideo*", "Save?"],
  allows_unknown: false,
  nodes_max: 2000,
  prompt_bytes_max: 4_194_304,
  run_limit_seconds: 3600,
  passthrough: ["/api/etn"],
  in_order: true,
}

test("unchanged settings stay the same", () => {
  for (const terms of [
    TERMS,
    { ...TERMS, price_tokens: 0 },
    { ...TERMS, price_tokens: 0, price_per_second: 0.25 },
    { ...TERMS, is_open: false, allows_unknown: true, allow: [], deny: [], passthrough: [] },
    { ...TERMS, in_order: false },
  ])
    expect(termsOf(typedTerms(terms))).toEqual({ terms })
})

test("one kind of price replaces the other", () => {
  const typed = typedTerms(TERMS)
  expect(termsOf({ ...typed, priceKind: "second", price: "0.5" })).toMatchObject({
    terms: { price_tokens: 0, price_per_second: 0.5 },
  })
  expect(termsOf({ ...typed, priceKind: "free", price: "" })).toMatchObject({
    terms: { price_tokens: 0, price_per_second: null },
  })
})

test("mistakes are reported by field", () => {
  const typed = typedTerms(TERMS)
  const wrongOf = (changes: Partial<typeof typed>) => {
    const result = termsOf({ ...typed, ...changes })
    return "wrong" in result ? [...result.wrong] : []
  }
  expect(wrongOf({ price: "0.5" })).toEqual(["price"])
  expect(wrongOf({ price: "" })).toEqual(["price"])
  expect(wrongOf({ priceKind: "second", price: "-1" })).toEqual(["price"])
  expect(wrongOf({ passthrough: "/api/../etn" })).toEqual(["passthrough"])
  expect(wrongOf({ allow: "x".repeat(201) })).toEqual(["allow"])
  expect(wrongOf({ nodes: "0", bytes: "999", seconds: "1.5" })).toEqual(["nodes", "bytes", "seconds"])
})

test("lines are trimmed, and duplicates are removed", () => {
  expect(linesOf(" A \n\nB\nA")).toEqual(["A", "B"])
})
