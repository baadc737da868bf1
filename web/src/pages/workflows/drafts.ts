/** What was typed and is registered nowhere: kept while the tab is open, so that a look at another page costs nothing. */

import type { Opened } from "./Drop"
import type { Exposed } from "./draft"

export interface Draft {
  opened: Opened
  exposed: readonly Exposed[]
  slug: string
  output: string
}

const kept = new Map<string, Draft>()

/** By the workflow whose next version it is; empty: a new one. */
export function draftOf(base: string): Draft | null {
  return kept.get(base) ?? null
}

export function keepDraft(base: string, draft: Draft | null): void {
  if (draft) kept.set(base, draft)
  else kept.delete(base)
}
