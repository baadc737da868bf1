/** Turns transactions into readable lines. The reservation and the consumption of a job's price
 * become one line. */

import type { TransactionAnswer, TransactionType } from "@/api/schema"

export type Kind = "held" | "spent" | "back" | "added"
export type Filter = "all" | "spent" | "back" | "added"

export interface Line {
  id: number
  kind: Kind
  amount: number
  /** The balance after the transaction. It is null if it is unknown because some types of
   * transactions are filtered out. */
  balance: number | null
  jobId: string | null
  effectId: string | null
  videoId: string | null
  payment: string | null
  /** True if the job has ended. For reserved tokens, this means that they were refunded. */
  isOver: boolean
  at: string
}

const KINDS: Record<TransactionType, Kind> = {
  PAYMENT_CREDIT: "added",
  JOB_RESERVE: "held",
  JOB_CONSUME: "spent",
  JOB_REFUND: "back",
}

/** The transaction types to request for each filter. "Spent" requires reservations as well, because
 * they contain the jobs' prices. */
export const TYPES: Record<Filter, readonly TransactionType[]> = {
  all: [],
  spent: ["JOB_CONSUME", "JOB_RESERVE"],
  back: ["JOB_REFUND"],
  added: ["PAYMENT_CREDIT"],
}

/** Returns the lines, newest first. If `hasMore` is true, consumed tokens whose reservation may be
 * on the next page are left out until that page is read. */
export function linesOf(
  transactions: readonly TransactionAnswer[],
  filter: Filter,
  balance: number | null,
  hasMore: boolean,
): Line[] {
  const reserved = new Map<string, number>()
  const ended = new Map<string, TransactionType>()
  for (const transaction of transactions) {
    if (!transaction.job_id) continue
    if (transaction.type === "JOB_RESERVE") reserved.set(transaction.job_id, transaction.amount)
    else ended.set(transaction.job_id, transaction.type)
  }
  const lines: Line[] = []
  for (const transaction of transactions) {
    const job = transaction.job_id ?? ""
    if (transaction.type === "JOB_RESERVE" && ended.get(job) === "JOB_CONSUME") continue
    if (transaction.type === "JOB_CONSUME" && hasMore && !reserved.has(job)) continue
    const held = transaction.type === "JOB_CONSUME" ? (reserved.get(job) ?? 0) : 0
    lines.push(lineOf(transaction, transaction.amount + held, ended.has(job)))
  }
  if (filter !== "all") return lines.filter((line) => line.kind === filter)
  return balance === null ? lines : withBalance(lines, balance)
}

function lineOf(from: TransactionAnswer, amount: number, isOver: boolean): Line {
  return {
    id: from.id,
    kind: KINDS[from.type],
    amount,
    balance: null,
    jobId: from.job_id,
    effectId: from.effect_id,
    videoId: from.video_id,
    payment: from.provider_transaction_id,
    isOver,
    at: from.created_at,
  }
}

function withBalance(lines: readonly Line[], balance: number): Line[] {
  let after = balance
  return lines.map((entry) => {
    const line = { ...entry, balance: after }
    after -= entry.amount
    return line
  })
}

/** Formats CSV with every field quoted, and prevents spreadsheets from reading a field as a
 * formula. */
export function csvOf(
  head: readonly string[],
  rows: readonly (readonly (string | number | null)[])[],
): string {
  const cell = (value: string | number | null) => {
    const text = String(value ?? "")
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe
  }
  return [head, ...rows].map((row) => row.map(cell).join(",")).join("\r\n")
}
