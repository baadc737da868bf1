/** One media item on the contact sheet. */

import type { VideoSummary } from "@/api/schema"
import { Icon, StateIcon } from "@/ui"
import { words } from "@/words/en/media"

/** Returns the picture of the result, or else of the input. Returns null if both are deleted or
 * can't be shown as a thumbnail. */
export function pictureOf(media: VideoSummary): { url: string; kind: "image" | "video" } | null {
  const kind = media.processed_content_type?.split("/")[0]
  if (media.processed_file_url && (kind === "image" || kind === "video"))
    return { url: media.processed_small_url ?? media.processed_file_url, kind }
  if (media.original_file_url && media.kind !== "audio")
    return { url: media.original_small_url ?? media.original_file_url, kind: media.kind }
  return null
}

export function isMaking({ status }: VideoSummary): boolean {
  return status === "queued" || status === "processing"
}

export function Picture({ url, kind, alt }: { url: string; kind: "image" | "video"; alt: string }) {
  if (kind === "image") return <img src={url} alt={alt} loading="lazy" decoding="async" />
  // A video starts when the pointer is over it.
  return (
    <video
      src={url}
      aria-label={alt}
      muted
      loop
      playsInline
      preload="metadata"
      onMouseEnter={(event) => void event.currentTarget.play().catch(() => undefined)}
      onMouseLeave={(event) => event.currentTarget.pause()}
    />
  )
}

export function Print({ media, name }: { media: VideoSummary; name: string }) {
  const picture = pictureOf(media)
  const percent = media.status === "processing" ? media.progress : null
  return (
    <div className={`print media-print is-${media.status}`}>
      {picture ? (
        <Picture {...picture} alt={name} />
      ) : (
        <span className="media-blank">
          <Icon name={media.kind === "audio" ? "sound" : "picture"} size={24} />
        </span>
      )}
      {isMaking(media) && <span className="media-shade" style={{ left: `${percent ?? 0}%` }} />}
      <Tag media={media} percent={percent} />
    </div>
  )
}

function Tag({ media, percent }: { media: VideoSummary; percent: number | null }) {
  const { status } = media
  if (status === "processing") return <span className="print-tag">{words.making(percent)}</span>
  if (status === "queued") return <span className="print-tag">{words.queued}</span>
  if (status === "failed")
    return (
      <span className="print-tag media-tag-bad">
        <StateIcon state="failed" size={12} />
        {words.failed}
      </span>
    )
  if (status === "cancelled") return <span className="print-tag">{words.cancelled}</span>
  if (status === "expired") return <span className="print-tag">{words.expired}</span>
  return null
}
