/** Reads from an address which runs to compare, and what to show. Pure functions. */

import type { ComparedValue } from "@/api/schema"

export type Show = "different" | "all"

export interface Pair {
  readonly a: string
  readonly b: string
  readonly graph: string
  readonly show: Show
}

export function pairOf(search: string): Pair {
  const given = new URLSearchParams(search)
  const text = (name: string) => given.get(name) ?? ""
  return {
    a: text("a"),
    b: text("b"),
    graph: text("graph"),
    show: text("show") === "all" ? "all" : "different",
  }
}

/** Groups values by section, in the original order. */
export function sectionsOf(values: readonly ComparedValue[]): [string, ComparedValue[]][] {
  const found = new Map<string, ComparedValue[]>()
  for (const each of values) {
    const known = found.get(each.section)
    if (known) known.push(each)
    else found.set(each.section, [each])
  }
  return [...found]
}
