/** One candidate as a print, with what people have drawn over it. */

import { Icon, Pencil } from "@/ui"
import { words } from "@/words/en/pipelines"
import { type Candidate, isPicture } from "./candidates"
import type { Book } from "./useRun"

interface PictureProps {
  candidate: Candidate
  book: Book
  alt: string
  /** Looked at right now: not when it comes into view. */
  eager?: boolean
}

export function Picture({ candidate, book, alt, eager }: PictureProps) {
  const { url, text, content_type } = candidate
  if (url && isPicture(candidate))
    return (
      <img
        src={url}
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

/** Drawn by a person: a loop around winners, a tick on approved ones, a cross over rejected ones. */
export function Drawn({ status }: { status: Candidate["status"] }) {
  if (status === "winner") return <Pencil kind="frame" />
  if (status === "approved") return <Pencil kind="tick" />
  if (status === "rejected") return <Pencil kind="cross" />
  return null
}
