/** Keeps unsaved graphs in this browser. A graph with problems can't be stored anywhere else. */

import { onSignOut } from "@/api"
import { documentOf } from "./document"
import { began, type History, type Sheet } from "./history"

export interface Saved {
  readonly id: string
  readonly version: number
  readonly sheet: Sheet
}

export interface Draft {
  readonly history: History
  readonly saved: Saved | null
}

const PREFIX = "comfyfleet.graph-draft."
const OPEN_MAX = 8
/** Drafts with their undo history, while this tab is open. */
const open = new Map<string, Draft>()
onSignOut(() => open.clear())

export function keepDraft(key: string, draft: Draft, isChanged: boolean): void {
  open.delete(key)
  open.set(key, draft)
  for (const oldKey of open.keys()) if (open.size > OPEN_MAX) open.delete(oldKey)
  try {
    if (isChanged) localStorage.setItem(PREFIX + key, JSON.stringify(draft.history.now))
    else localStorage.removeItem(PREFIX + key)
  } catch {
    // The storage is full, so the draft lasts only while this tab is open.
  }
}

export function forgetDraft(key: string): void {
  open.delete(key)
  try {
    localStorage.removeItem(PREFIX + key)
  } catch {
    // Storage is unavailable, so nothing was stored.
  }
}

/** Returns the draft as the user left it. One undo step leads back to the saved graph. */
export function draftOf(key: string, saved: Saved | null, first: Sheet): Draft {
  const draft = open.get(key)
  if (draft && (draft.saved?.version ?? 0) >= (saved?.version ?? 0)) return draft
  const start = began(saved?.sheet ?? first)
  const sheet = readDraft(key)
  if (!sheet) return { history: start, saved }
  return { history: { ...start, now: sheet, past: [start.now] }, saved }
}

function readDraft(key: string): Sheet | null {
  try {
    const stored = JSON.parse(localStorage.getItem(PREFIX + key) ?? "null") as Partial<Sheet> | null
    const document = stored && documentOf(stored.document)
    return document ? { document, places: stored.places ?? {} } : null
  } catch {
    return null
  }
}
