/** Judges candidates: approve, reject, winner or undo. A decision is sent once, appears
 * immediately, and can be undone. */

import { useCallback } from "react"
import { api, asApiError } from "@/api"
import type { CandidateAnswer } from "@/api/schema"
import { toast } from "@/ui"
import { closeToast } from "@/ui/Toast"
import { words } from "@/words/en/pipelines"
import type { Book } from "./useRun"

export type Verdict = "approve" | "reject" | "winner" | "undo"
export const VERDICT_KEYS: Record<string, Verdict> = { a: "approve", w: "winner", x: "reject", u: "undo" }

export async function sendVerdict(book: Book, id: string, verdict: Verdict): Promise<void> {
  book.put(await api.post<CandidateAnswer>(`${book.path}/candidates/${id}/${verdict}`))
}

/** The id of the last notice. Only one notice is shown at a time, because a user who judges many
 * candidates would see nothing else. */
let shown = 0

export function useJudge(book: Book): (id: string, verdict: Verdict) => void {
  return useCallback(
    (id: string, verdict: Verdict) => {
      const label = book.labels.get(id) ?? ""
      const undo = () => void sendVerdict(book, id, "undo").catch(notifyFailure)
      sendVerdict(book, id, verdict).then(() => {
        const act = verdict === "undo" ? undefined : { label: words.judged.undoAct, run: undo }
        const text = verdict === "reject" ? words.judged.rejectText : undefined
        closeToast(shown)
        shown = toast({ title: words.judged[verdict](label), text, ...(act && { act }) })
      }, notifyFailure)
    },
    [book],
  )
}

export function notifyFailure(thrown: unknown): void {
  const { message } = asApiError(thrown)
  toast({ state: "failed", title: message.charAt(0).toUpperCase() + message.slice(1) })
}

/** Checks whether a key press belongs to a text field or an open layer, and so isn't meant for
 * the page. */
export function isForAnotherElement(event: KeyboardEvent): boolean {
  const target = event.target as HTMLElement
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return true
  return target.closest?.("input:not([type=radio]), textarea, select, dialog, [role=menu]") !== null
}
