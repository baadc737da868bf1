/** Runs one action on many jobs: by their ids in batches, or on all jobs that match a filter. */

import { api } from "@/api"
import type { BulkAct, BulkAnswer, BulkFailureAnswer, BulkFilter } from "@/api/schema"

export const PART = 500
/** The maximum number of batches: 200 batches are 100,000 jobs. */
const PARTS_MAX = 200

export type Chosen = { ids: readonly string[] } | { filter: BulkFilter }

export interface Done {
  done: number
  failed: BulkFailureAnswer[]
}

type Post = (body: Record<string, unknown>) => Promise<BulkAnswer>

const post: Post = (body) => api.post<BulkAnswer>("/api/admin/jobs/bulk", body)

export async function actOn(
  act: BulkAct,
  chosen: Chosen,
  priority: number | null = null,
  onPart: (done: number) => void = () => undefined,
  send: Post = post,
): Promise<Done> {
  const order = priority === null ? { act } : { act, priority }
  const sum: Done = { done: 0, failed: [] }
  const add = (answer: BulkAnswer) => {
    sum.done += answer.done
    sum.failed.push(...answer.failed)
    onPart(sum.done)
  }
  if ("ids" in chosen) {
    for (let at = 0; at < chosen.ids.length; at += PART)
      add(await send({ ...order, ids: chosen.ids.slice(at, at + PART) }))
    return sum
  }
  let after: string | null = null
  for (let part = 0; part < PARTS_MAX; part += 1) {
    const answer: BulkAnswer = await send({ ...order, filter: chosen.filter, after })
    add(answer)
    after = answer.next
    if (after === null) break
  }
  return sum
}
