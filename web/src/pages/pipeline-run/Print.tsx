/** One candidate as a print, with what people have drawn over it, and what a judge says of it. */

import type { StepAnswer } from "@/api/schema"
import { Icon, Pencil } from "@/ui"
import { words } from "@/words/en/pipelines"
import { type Candidate, isPicture, isUnjudged } from "./candidates"
import type { Book } from "./useRun"

interface PictureProps {
  candidate: Candidate
  book: Book
  alt: string
  /** Looked at right now and by itself: the whole picture, and not only when it comes into view. */
  eager?: boolean
}

export function Picture({ candidate, book, alt, eager }: PictureProps) {
  const { url, small_url, text, content_type } = candidate
  if (url && isPicture(candidate))
    return (
      <img
        src={eager ? url : (small_url ?? url)}
        alt={alt}
        loading={eager ? "eager" : "lazy"}
        decoding="async"
        onError={() => book.renew(candidate)}
      />
    )
  if (url && content_type.startsWith("video/"))
    return <video src={url} aria-label={alt} muted loop playsInline preload="metadata" autoPlay={eager} />
  if (text !== null) return <span className="pipeline-run-text">{text}</span>
  return (
    <span className="pipeline-run-blank">
      <Icon name="picture" size={20} />
      <span>{words.grid.gone}</span>
    </span>
  )
}

/** Drawn by a person, not by a judge: a loop around winners, a tick on approved ones, a cross over rejected ones. */
export function Drawn({ candidate: { status, judged_by } }: { candidate: Candidate }) {
  if (judged_by === "judge") return null
  if (status === "winner") return <Pencil kind="frame" />
  if (status === "approved") return <Pencil kind="tick" />
  if (status === "rejected") return <Pencil kind="cross" />
  return null
}

/** What the judge of its step does or did with a candidate; empty where it left the word to people. */
export function judgedWord(candidate: Candidate, steps: readonly StepAnswer[]): string {
  const { status, judged_by, judge_error } = candidate
  if (judged_by === "judge") return words.judge.verdicts[status] ?? ""
  if (judged_by === null && judge_error !== null) return words.judge.failed
  return isUnjudged(candidate, steps) ? words.judge.coming : ""
}
