/** The undo history of the canvas. */

import type { GraphDocument, Places } from "./document"

export interface Sheet {
  readonly document: GraphDocument
  readonly places: Places
}

export interface History {
  readonly now: Sheet
  readonly past: readonly Sheet[]
  readonly future: readonly Sheet[]
  /** The kind of the last change. Another change of the same kind, such as the next letter typed in
   * a field, joins the same undo step. */
  readonly tag: string | null
}

const STEPS_MAX = 100

export function began(now: Sheet): History {
  return { now, past: [], future: [], tag: null }
}

export function changed(history: History, now: Sheet, tag: string | null = null): History {
  if (now.document === history.now.document && now.places === history.now.places) return history
  if (tag !== null && tag === history.tag) return { ...history, now, future: [] }
  return { now, past: [...history.past, history.now].slice(-STEPS_MAX), future: [], tag }
}

export function undone(history: History): History {
  const before = history.past.at(-1)
  if (!before) return history
  return {
    now: before,
    past: history.past.slice(0, -1),
    future: [history.now, ...history.future],
    tag: null,
  }
}

export function redone(history: History): History {
  const [next, ...future] = history.future
  if (!next) return history
  return { now: next, past: [...history.past, history.now], future, tag: null }
}
