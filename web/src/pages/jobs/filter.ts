/** Converts the job filter between chips, the page's address and API parameters. */

import type { BulkFilter, JobListed, JobStatus } from "@/api/schema"

export const KEYS = ["status", "workflow", "effect", "tenant", "worker", "error", "since", "until"] as const
export type FilterKey = (typeof KEYS)[number]

export interface Chip {
  readonly key: FilterKey
  readonly value: string
}

export const STATUSES: readonly JobStatus[] = ["queued", "processing", "completed", "failed", "cancelled"]
export const SPANS: Readonly<Record<string, number>> = { "1h": 3_600, "24h": 86_400, "7d": 604_800 }
const ALIASES: Readonly<Record<string, FilterKey>> = { state: "status" }
/** The words that pages show for a status, mapped to the API's status. */
const STATUS_WORDS: Readonly<Record<string, JobStatus>> = { running: "processing", succeeded: "completed" }
const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i
const WORD = /(?:(\w+):)?(?:"([^"]*)"?|(\S+))/g

export function isJobId(text: string): boolean {
  return UUID.test(text.trim())
}

function keyOf(name: string | undefined): FilterKey | null {
  const key = name && (ALIASES[name.toLowerCase()] ?? name.toLowerCase())
  return KEYS.find((filterKey) => filterKey === key) ?? null
}

function isValid({ key, value }: Chip): boolean {
  if (value === "") return false
  if (key === "status") return STATUSES.some((status) => status === value)
  if (key === "tenant") return UUID.test(value)
  if (key === "since" || key === "until")
    return Object.hasOwn(SPANS, value) || !Number.isNaN(Date.parse(value))
  return true
}

/** Parses text such as `state:failed workflow:relight out of memory`. Words without a key are
 * searched for in the error. `tenants` maps tenant names in lower case to their ids. Invalid
 * filters are returned as `rest`. */
export function parseTyped(
  text: string,
  tenants: ReadonlyMap<string, string> = new Map(),
): { chips: Chip[]; rest: string } {
  const chips: Chip[] = []
  const rest: string[] = []
  const free: string[] = []
  for (const [whole, name, quoted, plain] of text.matchAll(WORD)) {
    const key = keyOf(name)
    const text = (quoted ?? plain ?? "").trim()
    if (!key) {
      free.push(quoted !== undefined && !name ? text : whole)
      continue
    }
    const chip = { key, value: meaningOf(key, text, tenants) }
    if (isValid(chip)) chips.push(chip)
    else rest.push(whole)
  }
  if (free.length > 0) chips.push({ key: "error", value: free.join(" ") })
  return { chips, rest: rest.join(" ") }
}

function meaningOf(key: FilterKey, text: string, tenants: ReadonlyMap<string, string>): string {
  const small = text.toLowerCase()
  if (key === "status") return STATUS_WORDS[small] ?? small
  if (key === "tenant") return tenants.get(small) ?? text
  return text
}

/** Adds chips. Several statuses may be selected. For any other key, the last chip
 * replaces earlier ones. */
export function withChips(chips: readonly Chip[], added: readonly Chip[]): Chip[] {
  let result = [...chips]
  for (const chip of added) {
    result = result.filter(({ key, value }) => key !== chip.key || (key === "status" && value !== chip.value))
    result.push(chip)
  }
  return result
}

export function chipsOf(search: string): Chip[] {
  const params = new URLSearchParams(search)
  const chips = KEYS.flatMap((key) => params.getAll(key).map((value) => ({ key, value })))
  return withChips([], chips.filter(isValid))
}

export function searchOf(chips: readonly Chip[]): string {
  const params = new URLSearchParams()
  for (const key of KEYS) for (const chip of chips) if (chip.key === key) params.append(key, chip.value)
  return params.toString()
}

/** Converts chips to API parameters. Time ranges end at the current minute, so that the request URL
 * stays the same for a while. */
export function filterOf(chips: readonly Chip[], now: Date): BulkFilter {
  const filter: BulkFilter = {}
  const status = chips.filter((chip) => chip.key === "status").map((chip) => chip.value as JobStatus)
  if (status.length > 0) filter.status = status
  for (const { key, value } of chips) {
    if (key === "status") continue
    filter[key] = key === "since" || key === "until" ? momentOf(value, now) : value
  }
  return filter
}

function momentOf(value: string, now: Date): string {
  const seconds = SPANS[value]
  if (seconds === undefined) return new Date(value).toISOString()
  const minute = Math.floor(now.getTime() / 60_000) * 60_000
  return new Date(minute - seconds * 1000).toISOString()
}

/** Checks whether a job still matches the filter after its status has changed. */
export function isMatch(filter: BulkFilter, job: Pick<JobListed, "status">): boolean {
  return !filter.status?.length || filter.status.includes(job.status)
}

export interface View {
  readonly name: string
  readonly search: string
}

const VIEWS_KEY = "comfyfleet.views.jobs"
const VIEWS_MAX = 12

export function storedViews(storage: Pick<Storage, "getItem">): View[] {
  try {
    const stored: unknown = JSON.parse(storage.getItem(VIEWS_KEY) ?? "[]")
    if (!Array.isArray(stored)) return []
    return stored
      .filter((view) => typeof view?.name === "string" && typeof view?.search === "string")
      .slice(0, VIEWS_MAX)
  } catch {
    return []
  }
}

export function keepViews(storage: Pick<Storage, "setItem">, views: readonly View[]): void {
  try {
    storage.setItem(VIEWS_KEY, JSON.stringify(views.slice(-VIEWS_MAX)))
  } catch {
    // The browser can't store the views, so they last until the user leaves the page.
  }
}
