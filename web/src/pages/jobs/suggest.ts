/** Suggests filters for the typed text. */

import { stateOf } from "@/ui/Status"
import { words as common } from "@/words/en/common"
import { KEYS, SPANS, STATUSES } from "./filter"

export interface FilterValues {
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

export function filterValuesOf(lists: {
  workflows?: readonly { slug: string }[] | undefined
  effects?: readonly { slug: string }[] | undefined
  workers?: readonly { worker_id: string }[] | undefined
  tenants?: readonly { id: string; name: string }[] | undefined
}): FilterValues {
  const tenants = lists.tenants ?? []
  return {
    workflows: (lists.workflows ?? []).map((workflow) => workflow.slug),
    effects: (lists.effects ?? []).map((effect) => effect.slug),
    workers: (lists.workers ?? []).map((worker) => worker.worker_id),
    tenantNames: new Map(tenants.map((tenant) => [tenant.id, tenant.name])),
    tenantIds: new Map(tenants.map((tenant) => [tenant.name.toLowerCase(), tenant.id])),
    statusWord,
  }
}

export function suggest(typed: string, known: FilterValues): Suggestion[] {
  const word = typed.match(/(?:^|\s)(\w*):?("?[^"\s]*)$/)
  if (!word) return []
  const before = typed.slice(0, typed.length - word[0].trimStart().length)
  if (!typed.trimEnd().includes(":") || !word[0].includes(":"))
    return names()
      .filter((name) => name.startsWith((word[1] ?? "").toLowerCase()))
      .map((name) => ({ text: `${before}${name}:`, label: `${name}:` }))
  const name = word[1] ?? ""
  const prefix = (word[2] ?? "").replace(/^"/, "").toLowerCase()
  return valuesOf(name.toLowerCase(), known)
    .filter((value) => value.toLowerCase().includes(prefix))
    .slice(0, SUGGESTIONS_MAX)
    .map((value) => ({ text: `${before}${name}:${quoted(value)}`, label: `${name}: ${value}` }))
}

function names(): string[] {
  return KEYS.map((key) => (key === "status" ? "state" : key))
}

function quoted(value: string): string {
  return /\s/.test(value) ? `"${value}"` : value
}

function valuesOf(name: string, known: FilterValues): readonly string[] {
  if (name === "state" || name === "status") return STATUSES.map(known.statusWord)
  if (name === "workflow") return known.workflows
  if (name === "effect") return known.effects
  if (name === "worker") return known.workers
  if (name === "tenant") return [...known.tenantNames.values()]
  if (name === "since") return Object.keys(SPANS)
  return []
}
