/** Shows one candidate's picture, the marks of people's judgments, and the judge's verdict. */

import type { StepAnswer } from "@/api/schema"
import { Icon, Pencil } from "@/ui"
import { words } from "@/words/en/pipelines"
import { type Candidate, isPicture, isUnjudged } from "./candidates"
import type { Book } from "./useRun"

interface PictureProps {
  candidate: Candidate
  book: Book
  alt: string
  /** Loads the full-size picture immediately. Otherwise, a thumbnail loads when it scrolls into
   * view. */
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

/** Marks people's judgments: a loop around winners, a tick on approved candidates, a cross over
 * rejected ones. Judgments by an automatic judge get no mark. */
export function Drawn({ candidate: { status, judged_by } }: { candidate: Candidate }) {
  if (judged_by === "judge") return null
  if (status === "winner") return <Pencil kind="frame" />
  if (status === "approved") return <Pencil kind="tick" />
  if (status === "rejected") return <Pencil kind="cross" />
  return null
}

/** Describes the judge's verdict, failure or pending judgment of a candidate. Returns an empty text
 * if the judge left the decision to people. */
export function judgeStatus(candidate: Candidate, steps: readonly StepAnswer[]): string {
  const { status, judged_by, judge_error } = candidate
  if (judged_by === "judge") return words.judge.verdicts[status] ?? ""
  if (judged_by === null && judge_error !== null) return words.judge.failed
  return isUnjudged(candidate, steps) ? words.judge.coming : ""
}
