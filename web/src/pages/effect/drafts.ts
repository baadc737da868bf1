/** Keeps the files and values of forms that the user has left, as long as the tab is open. After a
 * reload, everything except unfinished uploads is restored. */

import { cache } from "@/api"
import type { Values } from "./form"
import { type Chosen, forget } from "./Media"

export interface Draft {
  /** The chosen files by property. Unfinished uploads continue. */
  chosen: Record<string, Chosen>
  values: Values
}

const DRAFTS_MAX = 3
const drafts = new Map<string, Draft>()

/** Returns the draft for a `place`, which identifies the account and the effect. */
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
  writeNotes(readNotes().filter(([storedPlace]) => storedPlace !== place))
}

/** The part of a form that survives a reload: values, and files by their media ids. */
export interface StoredDraft {
  media: Record<string, string>
  values: Values
}

const NOTES = "comfyfleet.effect-drafts"
const NOTE_CHARACTERS_MAX = 100_000

export function storeDraft(place: string, { chosen, values }: Draft): void {
  const media: Record<string, string> = {}
  for (const [name, file] of Object.entries(chosen)) {
    const id = file.mediaId ?? file.upload?.state().mediaId
    if (id) media[name] = id
  }
  const stored: StoredDraft = { media, values }
  if (JSON.stringify(stored).length > NOTE_CHARACTERS_MAX) return
  const others = readNotes().filter(([storedPlace]) => storedPlace !== place)
  writeNotes([...others, [place, stored] as const].slice(-DRAFTS_MAX))
}

export function storedDraft(place: string): StoredDraft | null {
  return readNotes().find(([storedPlace]) => storedPlace === place)?.[1] ?? null
}

type Notes = readonly (readonly [place: string, stored: StoredDraft])[]

function readNotes(): Notes {
  try {
    const notes: unknown = JSON.parse(sessionStorage.getItem(NOTES) ?? "[]")
    return Array.isArray(notes) ? (notes as Notes).filter(([, stored]) => stored?.media && stored.values) : []
  } catch {
    return []
  }
}

function writeNotes(notes: Notes): void {
  try {
    if (notes.length > 0) sessionStorage.setItem(NOTES, JSON.stringify(notes))
    else sessionStorage.removeItem(NOTES)
  } catch {
    // The storage is full, so the draft lasts only until the next reload.
  }
}

// Removes all drafts and stops their uploads, so that the next user neither sees nor continues
// them.
cache.onClear(() => {
  for (const place of [...drafts.keys()]) dropDraft(place)
})
