/** What was chosen and typed in forms that were left, in this tab: it is there again when one comes back. */

import { cache } from "@/api"
import type { Values } from "./form"
import { type Chosen, forget } from "./Media"

export interface Draft {
  /** Uploads among them go on. */
  chosen: Record<string, Chosen>
  values: Values
}

const DRAFTS_MAX = 3
const drafts = new Map<string, Draft>()

/** `place`: whose form of which effect it is. */
export function draftOf(place: string): Draft | undefined {
  return drafts.get(place)
}

export function keepDraft(place: string, draft: Draft): void {
  drafts.delete(place)
  drafts.set(place, draft)
  for (const oldest of drafts.keys()) {
    if (drafts.size <= DRAFTS_MAX) return
    dropDraft(oldest)
  }
}

export function dropDraft(place: string): void {
  Object.values(drafts.get(place)?.chosen ?? {}).forEach(forget)
  drafts.delete(place)
}

// Whoever signs in next sees nothing of them, and no upload goes on in another name.
cache.onClear(() => {
  for (const place of [...drafts.keys()]) dropDraft(place)
})
