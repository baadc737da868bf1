/** Suggests filters for the typed text. */

import { stateOf } from "@/ui/Status"
import { words as common } from "@/words/en/common"
import { KEYS, SPANS, STATUSES } from "./filter"

export interface Known {
  workflows: readonly string[]
  effects: readonly string[]
  workers: readonly string[]
  /** Maps tenant ids to names, and names in lower case to ids. */
  tenantNames: ReadonlyMap<string, string>
  tenantIds: ReadonlyMap<string, string>
  statusWord: (status: string) => string
}

export interface Suggestion {
  text: string
  label: string
}

const SUGGESTIONS_MAX = 8

export function statusWord(status: string): string {
  return common.states[stateOf(status)].toLowerCase()
}

export function knownOf(found: {
  workflows?: readonly { slug: string }[] | undefined
  effects?: readonly { slug: string }[] | undefined
  workers?: readonly { worker_id: string }[] | undefined
  tenants?: readonly { id: string; name: string }[] | undefined
}): Known {
  const tenants = found.tenants ?? []
  return {
    workflows: (found.workflows ?? []).map((each) => each.slug),
    effects: (found.effects ?? []).map((each) => each.slug),
    workers: (found.workers ?? []).map((each) => each.worker_id),
    tenantNames: new Map(tenants.map((each) => [each.id, each.name])),
    tenantIds: new Map(tenants.map((each) => [each.name.toLowerCase(), each.id])),
    statusWord,
  }
}

export function suggest(typed: string, known: Known): Suggestion[] {
  const word = typed.match(/(?:^|\s)(\w*):?("?[^"\s]*)$/)
  if (!word) return []
  const before = typed.slice(0, typed.length - word[0].trimStart().length)
  if (!typed.trimEnd().includes(":") || !word[0].includes(":"))
    return names()
      .filter((each) => each.startsWith((word[1] ?? "").toLowerCase()))
      .map((each) => ({ text: `${before}${each}:`, label: `${each}:` }))
  const name = word[1] ?? ""
  const begun = (word[2] ?? "").replace(/^"/, "").toLowerCase()
  return valuesOf(name.toLowerCase(), known)
    .filter((each) => each.toLowerCase().includes(begun))
    .slice(0, SUGGESTIONS_MAX)
    .map((each) => ({ text: `${before}${name}:${quoted(each)}`, label: `${name}: ${each}` }))
}

function names(): string[] {
  return KEYS.map((each) => (each === "status" ? "state" : each))
}

function quoted(value: string): string {
  return /\s/.test(value) ? `"${value}"` : value
}

function valuesOf(name: string, known: Known): readonly string[] {
  if (name === "state" || name === "status") return STATUSES.map(known.statusWord)
  if (name === "workflow") return known.workflows
  if (name === "effect") return known.effects
  if (name === "worker") return known.workers
  if (name === "tenant") return [...known.tenantNames.values()]
  if (name === "since") return Object.keys(SPANS)
  return []
}
