/** What was chosen and typed in forms that were left, in this tab: it is there again when one comes back, and after a
 * reload all of it but uploads that had not ended. */

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
  writeNotes(readNotes().filter(([each]) => each !== place))
}

/** What of a form outlives a reload: files by the ids of their media. */
export interface Noted {
  media: Record<string, string>
  values: Values
}

const NOTES = "comfyfleet.effect-drafts"
const NOTE_CHARACTERS_MAX = 100_000

export function noteDraft(place: string, { chosen, values }: Draft): void {
  const media: Record<string, string> = {}
  for (const [name, each] of Object.entries(chosen)) {
    const id = each.mediaId ?? each.upload?.state().mediaId
    if (id) media[name] = id
  }
  const noted: Noted = { media, values }
  if (JSON.stringify(noted).length > NOTE_CHARACTERS_MAX) return
  const others = readNotes().filter(([each]) => each !== place)
  writeNotes([...others, [place, noted] as const].slice(-DRAFTS_MAX))
}

export function notedDraft(place: string): Noted | null {
  return readNotes().find(([each]) => each === place)?.[1] ?? null
}

type Notes = readonly (readonly [place: string, noted: Noted])[]

function readNotes(): Notes {
  try {
    const told: unknown = JSON.parse(sessionStorage.getItem(NOTES) ?? "[]")
    return Array.isArray(told) ? (told as Notes).filter(([, noted]) => noted?.media && noted.values) : []
  } catch {
    return []
  }
}

function writeNotes(notes: Notes): void {
  try {
    if (notes.length > 0) sessionStorage.setItem(NOTES, JSON.stringify(notes))
    else sessionStorage.removeItem(NOTES)
  } catch {
    // There is no room: it is kept until the page is loaded again.
  }
}

// Whoever signs in next sees nothing of them, and no upload goes on in another name.
cache.onClear(() => {
  for (const place of [...drafts.keys()]) dropDraft(place)
})
