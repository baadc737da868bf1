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
  const params = new URLSearchParams(search)
  const text = (name: string) => params.get(name) ?? ""
  return {
    a: text("a"),
    b: text("b"),
    graph: text("graph"),
    show: text("show") === "all" ? "all" : "different",
  }
}

/** Groups values by section, in the original order. */
export function sectionsOf(values: readonly ComparedValue[]): [string, ComparedValue[]][] {
  const sections = new Map<string, ComparedValue[]>()
  for (const value of values) {
    const section = sections.get(value.section)
    if (section) section.push(value)
    else sections.set(value.section, [value])
  }
  return [...sections]
}
