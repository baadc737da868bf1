/** Shows a result file: before and after, a picture, a player, or a note that it can't be
 * displayed. */

import { useState } from "react"
import { BeforeAfter } from "@/ui/Wipe"
import { words } from "@/words/en/result"

export interface Shown {
  url: string
  filename: string
  content_type: string
}

/** Limits the frame's ratio, so that even a very narrow picture leaves room for the handle of
 * the line. */
export function shownRatio(width: number, height: number): number {
  return Math.max(0.3, Math.min(4, width / height))
}

export function View({ file, before, title }: { file: Shown; before: Shown | null; title: string }) {
  const [ratio, setRatio] = useState<number | null>(null)
  const alt = words.shows(title)
  if (file.content_type.startsWith("video/"))
    return (
      // biome-ignore lint/a11y/useMediaCaption: results have no captions
      <video className="result-player" src={file.url} controls loop playsInline aria-label={alt} />
    )
  if (file.content_type.startsWith("audio/"))
    return (
      // biome-ignore lint/a11y/useMediaCaption: results have no captions
      <audio src={file.url} controls aria-label={alt} />
    )
  if (!file.content_type.startsWith("image/") || file.content_type.startsWith("image/svg"))
    return <p className="quiet">{words.noPreview}</p>
  const measured = (image: HTMLImageElement) =>
    image.naturalHeight > 0 && setRatio(shownRatio(image.naturalWidth, image.naturalHeight))
  const look = { "--ratio": ratio ?? 1.5 } as Record<string, number>
  if (!before?.content_type.startsWith("image/") || ratio === null)
    return (
      <div className="result-print" style={look}>
        <img src={file.url} alt={alt} onLoad={(event) => measured(event.currentTarget)} />
      </div>
    )
  return (
    <div className="result-print" style={look}>
      <BeforeAfter before={before.url} after={file.url} alt={alt} ratio={String(ratio)} />
    </div>
  )
}
