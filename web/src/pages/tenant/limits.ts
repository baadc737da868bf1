/** Parses the typed limits, and determines the API calls that set them. */

import type { TenantAnswer } from "@/api/schema"

const GB = 1e9

export interface TypedLimits {
  queued: string
  low: string
  high: string
  days: string
  gigabytes: string
}

export type TenantLimits = Pick<
  TenantAnswer,
  "max_queued" | "min_priority" | "max_priority" | "retention_days" | "max_storage_bytes"
>

export function typedOf(tenant: TenantLimits): TypedLimits {
  const text = (value: number | null) => (value === null ? "" : String(value))
  return {
    queued: text(tenant.max_queued),
    low: text(tenant.min_priority),
    high: text(tenant.max_priority),
    days: text(tenant.retention_days),
    gigabytes: text(tenant.max_storage_bytes === null ? null : tenant.max_storage_bytes / GB),
  }
}

function whole(text: string): number | null | undefined {
  if (text.trim() === "") return null
  return /^-?\d+$/.test(text.trim()) ? Number(text) : undefined
}

function bytesOf(text: string): number | null | undefined {
  if (text.trim() === "") return null
  const value = Number(text.trim().replace(",", "."))
  return Number.isFinite(value) && value >= 0 ? Math.round(value * GB) : undefined
}

export type WrongLimit = keyof TypedLimits

/** Returns the limits, or the names of the fields that aren't valid. */
export function limitsOf(typed: TypedLimits): { limits: TenantLimits } | { wrong: ReadonlySet<WrongLimit> } {
  const queued = whole(typed.queued)
  const low = whole(typed.low)
  const high = whole(typed.high)
  const days = whole(typed.days)
  const storage = bytesOf(typed.gigabytes)
  const wrong = new Set<WrongLimit>()
  if (queued === undefined || (queued !== null && queued < 0)) wrong.add("queued")
  if (low === undefined || low === null) wrong.add("low")
  if (high === undefined || high === null || (typeof low === "number" && high < low)) wrong.add("high")
  if (days === undefined || (days !== null && days < 1)) wrong.add("days")
  if (storage === undefined) wrong.add("gigabytes")
  if (wrong.size > 0) return { wrong }
  return {
    limits: {
      max_queued: queued as number | null,
      min_priority: low as number,
      max_priority: high as number,
      retention_days: days as number | null,
      max_storage_bytes: storage as number | null,
    },
  }
}

/** Returns the calls that set changed limits. Each call requires its own role. */
export function changes(before: TenantLimits, after: TenantLimits): { path: string; body: object }[] {
  const calls: { path: string; body: object }[] = []
  const { max_queued, min_priority, max_priority, retention_days, max_storage_bytes } = after
  if (
    max_queued !== before.max_queued ||
    min_priority !== before.min_priority ||
    max_priority !== before.max_priority
  )
    calls.push({ path: "limits", body: { max_queued, min_priority, max_priority } })
  if (retention_days !== before.retention_days) calls.push({ path: "retention", body: { retention_days } })
  if (max_storage_bytes !== before.max_storage_bytes)
    calls.push({ path: "quota", body: { max_storage_bytes } })
  return calls
}
