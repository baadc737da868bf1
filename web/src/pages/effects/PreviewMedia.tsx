/** The picture or muted video on an effect's card. */

import type { Preview } from "@/pages/catalogue/effects"

export function PreviewMedia({ preview, alt }: { preview: Preview; alt: string }) {
  if (!preview.isVideo) return <img src={preview.after} alt={alt} loading="lazy" decoding="async" />
  const isStill = window.matchMedia("(prefers-reduced-motion: reduce)").matches
  return (
    <video
      src={preview.after}
      muted
      loop
      playsInline
      autoPlay={!isStill}
      preload="metadata"
      aria-label={alt || undefined}
      aria-hidden={alt === "" || undefined}
    />
  )
}
