/** Keeps unregistered drafts while the tab is open, so that the user can visit another page
 * without losing them. */

import type { Opened } from "./Drop"
import type { Exposed } from "./draft"

export interface Draft {
  opened: Opened
  exposed: readonly Exposed[]
  slug: string
  output: string
}

const drafts = new Map<string, Draft>()

/** Returns the draft of a workflow's next version. An empty name means a new workflow. */
export function draftOf(base: string): Draft | null {
  return drafts.get(base) ?? null
}

export function keepDraft(base: string, draft: Draft | null): void {
  if (draft) drafts.set(base, draft)
  else drafts.delete(base)
}
