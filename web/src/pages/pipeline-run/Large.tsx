/** Shows a picture that fills the window. Arrow keys switch to the other picture. Space and Escape
 * close the view. */

import { useLayoutEffect, useRef } from "react"
import { Button } from "@/ui"
import { words } from "@/words/en/pipelines"
import type { Candidate } from "./candidates"
import { Picture } from "./Print"
import type { Book } from "./useRun"

interface LargeProps {
  candidates: readonly Candidate[]
  at: number
  onMove: (at: number) => void
  onClose: () => void
  /** Set if the user has to choose a picture. Called with the index of the chosen one. */
  onChoose?: (at: number) => void
  book: Book
}

export function Large({ candidates, at, onMove, onClose, onChoose, book }: LargeProps) {
  const box = useRef<HTMLDialogElement>(null)
  // Closes the dialog before it is removed from the page, so that the focus returns to the previous
  // element.
  useLayoutEffect(() => {
    const dialog = box.current
    dialog?.showModal()
    return () => dialog?.close()
  }, [])
  const candidate = candidates[at]
  const label = candidate ? (book.labels.get(candidate.id) ?? "") : ""
  const move = () => onMove((at + 1) % candidates.length)
  return (
    <dialog
      ref={box}
      className="pipeline-run-full"
      aria-label={words.side.label(label)}
      onCancel={(event) => {
        event.preventDefault()
        onClose()
      }}
      onKeyDown={(event) => {
        if (event.key === "ArrowLeft") onMove(0)
        else if (event.key === "ArrowRight") onMove(candidates.length - 1)
        else if (event.key === " ") onClose()
        else return
        event.preventDefault()
      }}
    >
      <div className="pipeline-run-full-picture">
        {candidate && <Picture candidate={candidate} book={book} alt={words.side.label(label)} eager />}
      </div>
      <div className="pipeline-run-full-acts">
        <b className="mono">{label}</b>
        {candidates.length > 1 && (
          <Button size="small" icon="wipe" onClick={move}>
            {words.vote.other}
          </Button>
        )}
        {onChoose && (
          <Button size="small" kind="go" onClick={() => onChoose(at)}>
            {words.vote.thisOne}
          </Button>
        )}
        <Button size="small" icon="cross" label={words.vote.closeLarge} onClick={onClose} />
      </div>
    </dialog>
  )
}
