/** Parses and checks the settings for prompts from ComfyUI clients as an operator has typed them.
 * Pure functions. */

import type { FleetPromptsAnswer } from "@/api/schema"

/** The settings that an operator can change. The warning occurs only in API responses. */
export type FleetPrompts = Omit<FleetPromptsAnswer, "warning">

export type PriceKind = "free" | "each" | "second"

export interface TypedTerms {
  isOpen: boolean
  priceKind: PriceKind
  price: string
  /** One entry per line, as in the next two fields. */
  allow: string
  deny: string
  passthrough: string
  allowsUnknown: boolean
  inOrder: boolean
  nodes: string
  bytes: string
  seconds: string
}

export type WrongTerm = "price" | "allow" | "deny" | "passthrough" | "nodes" | "bytes" | "seconds"

const PRICE_MAX = 1_000_000_000
/** The allowed ranges, which the control plane enforces as well. */
export const BOUNDS = {
  nodes: [1, 100_000],
  bytes: [1_000, 64 * 1024 ** 2],
  seconds: [1, 7 * 24 * 3_600],
} as const
const LINES_MAX = { allow: 500, deny: 500, passthrough: 20 }
// biome-ignore lint/suspicious/noControlCharactersInRegex: the expression rejects control characters
const NODE_TYPE = /^[^\x00-\x1f\x7f]{1,200}$/
const ROUTE = /^(\/[A-Za-z0-9_-]{1,60}){1,6}$/

/** Returns the trimmed lines without duplicates. */
export function linesOf(text: string): string[] {
  const all = text.split("\n").map((line) => line.trim())
  return [...new Set(all.filter(Boolean))]
}

export function areNodeTypes(text: string): boolean {
  const lines = linesOf(text)
  return lines.length <= LINES_MAX.allow && lines.every((line) => NODE_TYPE.test(line))
}

export function typedTerms(terms: FleetPrompts): TypedTerms {
  const perSecond = terms.price_per_second
  return {
    isOpen: terms.is_open,
    priceKind: perSecond !== null ? "second" : terms.price_tokens > 0 ? "each" : "free",
    price: String(perSecond ?? (terms.price_tokens || 1)),
    allow: terms.allow.join("\n"),
    deny: terms.deny.join("\n"),
    passthrough: terms.passthrough.join("\n"),
    allowsUnknown: terms.allows_unknown,
    inOrder: terms.in_order,
    nodes: String(terms.nodes_max),
    bytes: String(terms.prompt_bytes_max),
    seconds: String(terms.run_limit_seconds),
  }
}

export function termsOf(typed: TypedTerms): { terms: FleetPrompts } | { wrong: ReadonlySet<WrongTerm> } {
  const price = Number(typed.price)
  const isWhole = Number.isInteger(price)
  const routes = linesOf(typed.passthrough)
  const wrong = new Set<WrongTerm>()
  if (typed.priceKind !== "free" && !(typed.price.trim() !== "" && price > 0 && price <= PRICE_MAX))
    wrong.add("price")
  if (typed.priceKind === "each" && !isWhole) wrong.add("price")
  if (!areNodeTypes(typed.allow)) wrong.add("allow")
  if (!areNodeTypes(typed.deny)) wrong.add("deny")
  if (routes.length > LINES_MAX.passthrough || !routes.every((route) => ROUTE.test(route)))
    wrong.add("passthrough")
  for (const key of ["nodes", "bytes", "seconds"] as const) {
    const [least, most] = BOUNDS[key]
    const value = Number(typed[key])
    if (!Number.isInteger(value) || value < least || value > most) wrong.add(key)
  }
  if (wrong.size > 0) return { wrong }
  return {
    terms: {
      is_open: typed.isOpen,
      price_tokens: typed.priceKind === "each" ? price : 0,
      price_per_second: typed.priceKind === "second" ? price : null,
      allow: linesOf(typed.allow),
      deny: linesOf(typed.deny),
      allows_unknown: typed.allowsUnknown,
      nodes_max: Number(typed.nodes),
      prompt_bytes_max: Number(typed.bytes),
      run_limit_seconds: Number(typed.seconds),
      passthrough: routes,
      in_order: typed.inOrder,
    },
  }
}
