/** Shows a picture before and after an effect, with a movable line between the two. */

import { type KeyboardEvent, type PointerEvent, type ReactNode, useEffect, useRef, useState } from "react"
import { words } from "@/words/en/common"
import { Icon } from "./Icon"

interface WipeProps {
  before: string
  after: string
  /** Describes the picture. */
  alt: string
  /** A CSS aspect-ratio, which gives the box its size before the pictures load. */
  ratio?: string
  children?: ReactNode
}

interface WipePreviewProps extends WipeProps {
  /** True if both are videos, which play while they are visible. */
  isVideo?: boolean
}

/** Moves on hover and while it is visible. It stays in the middle for users who prefer reduced
 * motion. */
export function WipePreview({ before, after, alt, ratio = "4 / 5", isVideo, children }: WipePreviewProps) {
  const box = useRef<HTMLDivElement>(null)
  const isSeen = useSeen(box)
  return (
    <div ref={box} className={isSeen ? "wipe wipe-play" : "wipe"} style={{ aspectRatio: ratio }}>
      {isVideo ? (
        <>
          <Clip src={before} isPlaying={isSeen} />
          <Clip src={after} alt={alt} isPlaying={isSeen} />
        </>
      ) : (
        <>
          <img src={before} alt="" loading="lazy" decoding="async" />
          <img src={after} alt={alt} loading="lazy" decoding="async" className="wipe-after" />
        </>
      )}
      <i aria-hidden="true" />
      {children}
    </div>
  )
}

/** Plays a muted video, unless the user prefers reduced motion. */
function Clip({ src, alt, isPlaying }: { src: string; alt?: string; isPlaying: boolean }) {
  const clip = useRef<HTMLVideoElement>(null)
  useEffect(() => {
    const isStill = window.matchMedia("(prefers-reduced-motion: reduce)").matches
    // A browser that blocks autoplay shows the first frame.
    if (isPlaying && !isStill) clip.current?.play().catch(() => {})
    else clip.current?.pause()
  }, [isPlaying])
  const named = alt ? { role: "img", "aria-label": alt, className: "wipe-after" } : { "aria-hidden": true }
  return <video ref={clip} src={src} muted loop playsInline preload="metadata" tabIndex={-1} {...named} />
}

/** The maximum number of previews that move at the same time. */
const MOVING_MAX = 6
const moving = new Set<Element>()

function useSeen(box: { current: HTMLElement | null }): boolean {
  const [isSeen, setSeen] = useState(false)
  useEffect(() => {
    const element = box.current
    if (!element) return undefined
    const note = (entries: IntersectionObserverEntry[]) => {
      const isIn = entries.at(-1)?.isIntersecting ?? false
      if (isIn && moving.size < MOVING_MAX) moving.add(element)
      if (!isIn) moving.delete(element)
      setSeen(moving.has(element))
    }
    const observer = new IntersectionObserver(note, { threshold: 0.6 })
    observer.observe(element)
    return () => {
      observer.disconnect()
      moving.delete(element)
    }
  }, [box])
  return isSeen
}

/** Compares the two pictures. The line between them follows the pointer and the arrow keys. */
export function BeforeAfter({ before, after, alt, ratio }: WipeProps) {
  const [at, setAt] = useState(50)
  const box = useRef<HTMLDivElement>(null)
  const move = (event: PointerEvent) => {
    if (event.type === "pointermove" && event.buttons === 0) return
    const area = box.current?.getBoundingClientRect()
    if (area && area.width > 0) setAt(clamp(((event.clientX - area.left) / area.width) * 100))
  }
  const step = (event: KeyboardEvent) => {
    const size = event.shiftKey ? 10 : 1
    const next = {
      ArrowLeft: at - size,
      ArrowDown: at - size,
      ArrowRight: at + size,
      ArrowUp: at + size,
      Home: 0,
      End: 100,
    }[event.key]
    if (next === undefined) return
    event.preventDefault()
    setAt(clamp(next))
  }
  return (
    <div
      ref={box}
      className="wipe wipe-hand"
      style={{ "--x": `${at}%`, aspectRatio: ratio } as Record<string, string>}
      onPointerDown={(event) => {
        event.currentTarget.setPointerCapture(event.pointerId)
        move(event)
      }}
      onPointerMove={move}
    >
      <img src={before} alt="" draggable={false} />
      <img src={after} alt={alt} className="wipe-after" draggable={false} />
      <i aria-hidden="true" />
      <div
        className="wipe-grip"
        role="slider"
        tabIndex={0}
        aria-label={words.wipe}
        aria-valuemin={0}
        aria-valuemax={100}
        aria-valuenow={Math.round(at)}
        onKeyDown={step}
      >
        <Icon name="wipe" />
      </div>
      <span className="print-tag tag-left" aria-hidden="true">
        {words.before}
      </span>
      <span className="print-tag tag-right" aria-hidden="true">
        {words.after}
      </span>
    </div>
  )
}

function clamp(value: number): number {
  return Math.max(0, Math.min(100, value))
}
