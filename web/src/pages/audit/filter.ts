/** Converts the audit filter between the page's address and API parameters. */

import type { Query } from "@/api"

export const KEYS = ["actor", "action", "subject", "tenant", "span", "since", "until"] as const
export type AuditKey = (typeof KEYS)[number]
export type AuditFilter = Readonly<Partial<Record<AuditKey, string>>>

export const SPAN_SECONDS: Readonly<Record<string, number>> = { "1h": 3_600, "24h": 86_400, "7d": 604_800 }
const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i
/** Actors that aren't operators. */
const SYSTEM_ACTORS = ["admin", "sweep", "system"]

export function filterOf(search: string): AuditFilter {
  const params = new URLSearchParams(search)
  const filter: Partial<Record<AuditKey, string>> = {}
  for (const key of KEYS) {
    const value = params.get(key)?.trim()
    if (value && isValid(key, value)) filter[key] = value
  }
  return filter
}

function isValid(key: AuditKey, value: string): boolean {
  if (key === "tenant") return UUID.test(value)
  if (key === "span") return Object.hasOwn(SPAN_SECONDS, value)
  if (key === "since" || key === "until") return !Number.isNaN(Date.parse(value))
  return true
}

export function searchOf(filter: AuditFilter): string {
  const params = new URLSearchParams()
  for (const key of KEYS) {
    const value = filter[key]
    if (value) params.set(key, value)
  }
  return params.toString()
}

/** Converts the filter to API parameters. A time range ends at the current minute, so that the
 * request URL stays the same for a while. */
export function queryOf(filter: AuditFilter, now: Date): Query {
  const { actor, action, subject, tenant, span, since, until } = filter
  const query: Query = { actor, action, subject, tenant }
  const seconds = span && SPAN_SECONDS[span]
  if (seconds) {
    const minute = Math.floor(now.getTime() / 60_000) * 60_000
    return { ...query, since: new Date(minute - seconds * 1000).toISOString() }
  }
  const moment = (text: string | undefined) => (text ? new Date(text).toISOString() : undefined)
  return { ...query, since: moment(since), until: moment(until) }
}

/** Converts a typed name to the audit log's form: `ada` becomes `operator:ada`. */
export function actorOf(typed: string, operators: readonly string[]): string {
  const text = typed.trim()
  if (SYSTEM_ACTORS.includes(text) || text.includes(":")) return text
  const match = operators.find((operator) => operator.toLowerCase() === text.toLowerCase())
  return match ? `operator:${match}` : text
}

const PLACES: Readonly<Record<string, (name: string) => string>> = {
  job: (name) => `/console/jobs/${name}`,
  worker: (name) => `/console/workers/${encodeURIComponent(name)}`,
  tenant: (name) => `/console/tenants/${name}`,
  workflow: (name) => `/console/workflows/${encodeURIComponent(name)}`,
  effect: (name) => `/console/effects/${encodeURIComponent(name)}`,
  fleet: () => "/console/fleets",
  operator: () => "/console/settings",
}

/** Returns the address of the page about an entry's subject, or null if there is no such page. */
export function placeOf(subject: string): string | null {
  const [kind = "", ...rest] = subject.split(":")
  return rest.length > 0 ? (PLACES[kind]?.(rest.join(":")) ?? null) : null
}

/** Formats an entry's details as one line. */
export function inOneLine(details: Readonly<Record<string, unknown>>): string {
  return Object.entries(details)
    .map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`)
    .join(", ")
}
