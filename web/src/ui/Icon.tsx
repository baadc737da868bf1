/** Icons on a 16 px grid with 1.5 px strokes. They are decorative, because text always
 * accompanies them. */

import type { ReactNode } from "react"

const PATHS = {
  search: (
    <>
      <circle cx="7" cy="7" r="4.5" />
      <path d="m10.5 10.5 3.5 3.5" />
    </>
  ),
  tick: <path d="m3 8.5 3.2 3.2L13 4.8" />,
  cross: <path d="m4 4 8 8M12 4l-8 8" />,
  plus: <path d="M8 3v10M3 8h10" />,
  minus: <path d="M3 8h10" />,
  more: (
    <>
      <circle cx="3.5" cy="8" r=".8" />
      <circle cx="8" cy="8" r=".8" />
      <circle cx="12.5" cy="8" r=".8" />
    </>
  ),
  grid: <path d="M2.5 2.5h4.5v4.5H2.5zM9 2.5h4.5v4.5H9zM2.5 9h4.5v4.5H2.5zM9 9h4.5v4.5H9z" />,
  bolt: <path d="M9 1.5 3.5 9H8l-1 5.5L12.5 7H8z" />,
  download: <path d="M8 2.5V11M4.5 7.5 8 11l3.5-3.5M2.5 13.5h11" />,
  upload: <path d="M8 11V2.5M4.5 6 8 2.5 11.5 6M2.5 13.5h11" />,
  sliders: (
    <>
      <path d="M2.5 5h6M12 5h1.5M2.5 11H4M7.5 11h6" />
      <circle cx="10.2" cy="5" r="1.7" />
      <circle cx="5.8" cy="11" r="1.7" />
    </>
  ),
  copy: (
    <>
      <rect x="5.5" y="5.5" width="8" height="8" rx="1" />
      <path d="M3 10.5H2.5v-8h8V3" />
    </>
  ),
  right: <path d="m6 3.5 4.5 4.5L6 12.5" />,
  left: <path d="M10 3.5 5.5 8l4.5 4.5" />,
  down: <path d="m4.5 6.5 3.5 3.5 3.5-3.5" />,
  up: <path d="m4.5 9.5 3.5-3.5 3.5 3.5" />,
  picture: (
    <>
      <rect x="2" y="3" width="12" height="10" rx="1" />
      <path d="m2.5 11 3.5-3.5 3 3 2-2 2.5 2.5" />
    </>
  ),
  video: (
    <>
      <rect x="2" y="3" width="12" height="10" rx="1" />
      <path d="M5 3v10M11 3v10M2 6.3h3M2 9.7h3M11 6.3h3M11 9.7h3" />
    </>
  ),
  sound: <path d="M3 6.5h2L8.5 4v8L5 9.5H3zM11 6a3 3 0 0 1 0 4M12.7 4.3a5.5 5.5 0 0 1 0 7.4" />,
  offline: (
    <path d="m2 2 12 12M3 7.5a8 8 0 0 1 3-1.8M9.5 5.6A8 8 0 0 1 13 7.5M5.3 10a4.3 4.3 0 0 1 2-1.1M8 13h.01" />
  ),
  undo: <path d="M3 6h6.5a3.5 3.5 0 0 1 0 7H6M5.5 3 2.8 6l2.7 3" />,
  person: (
    <>
      <circle cx="8" cy="5.5" r="2.7" />
      <path d="M2.8 13.5c.7-2.7 2.7-4 5.2-4s4.5 1.3 5.2 4" />
    </>
  ),
  token: (
    <>
      <ellipse cx="8" cy="8" rx="5.5" ry="5.5" />
      <path d="M8 5.2v5.6" />
    </>
  ),
  play: <path d="M5 3.2v9.6L13 8z" />,
  pause: <path d="M5.5 3.5v9M10.5 3.5v9" />,
  stop: <rect x="4" y="4" width="8" height="8" rx="1" />,
  again: <path d="M13 8a5 5 0 1 1-1.6-3.7L13.5 6M13.5 2.5V6H10" />,
  key: (
    <>
      <circle cx="5" cy="8" r="2.7" />
      <path d="M7.7 8H14M11.5 8v2.5" />
    </>
  ),
  link: <path d="M6.5 9.5 9.5 6.5M7 4.5l1-1a3 3 0 0 1 4.5 4.5l-1 1M9 11.5l-1 1A3 3 0 0 1 3.5 8l1-1" />,
  clock: (
    <>
      <circle cx="8" cy="8" r="5.5" />
      <path d="M8 5v3.2l2 1.3" />
    </>
  ),
  sun: (
    <>
      <circle cx="8" cy="8" r="2.8" />
      <path d="M8 1.8v1.4M8 12.8v1.4M1.8 8h1.4M12.8 8h1.4M3.6 3.6l1 1M11.4 11.4l1 1M12.4 3.6l-1 1M4.6 11.4l-1 1" />
    </>
  ),
  moon: <path d="M13.2 9.6A5.6 5.6 0 0 1 6.4 2.8a5.6 5.6 0 1 0 6.8 6.8z" />,
  wipe: <path d="M6 4.5 2.5 8 6 11.5M10 4.5 13.5 8 10 11.5" />,
  expand: <path d="M6 2.5H2.5V6M10 2.5h3.5V6M6 13.5H2.5V10M10 13.5h3.5V10" />,
  trash: <path d="M3 4.5h10M6.5 4.5v-2h3v2M4.2 4.5l.6 9h6.4l.6-9" />,
  edit: <path d="m3 13 .7-3L10.5 3.2l2.3 2.3L6 12.3z" />,
  dice: (
    <>
      <rect x="2.5" y="2.5" width="11" height="11" rx="2" />
      <path d="M5.5 5.5h.01M10.5 5.5h.01M8 8h.01M5.5 10.5h.01M10.5 10.5h.01" />
    </>
  ),
  bell: <path d="M4 11.5V7.2a4 4 0 0 1 8 0v4.3l1 1H3zM6.8 14h2.4" />,
  /** A graph: two nodes lead to a third. */
  graph: <path d="M2 3h4v3H2zM2 10h4v3H2zM10.5 6.5h3.5v3h-3.5zM6 4.5h2V8h2.5M6 11.5h2V8" />,
  /** A pipeline: a parent with children. */
  tree: (
    <>
      <circle cx="4" cy="8" r="1.7" />
      <circle cx="12" cy="3.7" r="1.7" />
      <circle cx="12" cy="12.3" r="1.7" />
      <path d="M5.7 8h1.8V3.7h2.8M7.5 8v4.3h2.8" />
    </>
  ),
  console: <path d="M2.5 13.5V9h2.5v4.5M6.8 13.5V3h2.5v10.5M11 13.5V6.5h2.5v7" />,
  queue: <path d="M2.5 4h11M2.5 8h11M2.5 12h6" />,
  machine: <path d="M2.5 3h11v7.5h-11zM5.5 13.5h5M8 10.5v3" />,
  out: <path d="M6.5 2.5h-4v11h4M6.5 8H14M11 5l3 3-3 3" />,
  warning: <path d="M8 2.5 14 13H2zM8 6.5v3M8 11.3v.1" />,
} satisfies Record<string, ReactNode>

export type IconName = keyof typeof PATHS

export function Icon({ name, size }: { name: IconName; size?: number }) {
  return (
    <svg className="icon" viewBox="0 0 16 16" width={size ?? 16} height={size ?? 16} aria-hidden="true">
      {PATHS[name]}
    </svg>
  )
}

/** The logo: prints, one of them circled. */
export function Mark() {
  return (
    <svg className="mark" viewBox="0 0 32 28" aria-hidden="true">
      <path fill="currentColor" d="M2 5h9v9H2zM2 17h9v9H2zM14 17h9v9h-9zM16.5 6.5h7v6.5h-7z" />
      <path
        className="mark-loop"
        d="M27.4 4.2C24.2 1.2 16.2 1 13.6 4.7c-2.5 3.6-1.3 9 2.4 10.6 4 1.7 10.7 1.2 12.3-3.1C29.7 8.3 27.6 3 22.6 1.6"
      />
    </svg>
  )
}

const STROKES = {
  loop: "M62 3C36-2 6 6 3 44c-3 40 22 55 50 53 32-2 46-24 44-56C95 14 76 1 48 5",
  /** Drawn around a print, leaving its corners free. */
  frame: "M66 3C44-1 11-1 4 6-1 19 0 80 3 93c5 8 37 7 65 6 24-1 31-3 32-14 1-24 1-55-1-73C96 1 73 0 45 4",
  /** Drawn in a corner of a print. */
  tick: "M4 58c12 8 20 20 27 38C44 58 66 24 97 5",
  cross: "M6 8c26 26 58 58 88 86M93 6C66 34 36 62 8 94",
}

/** A hand-drawn mark on a print that was chosen or rejected. Decorative. */
export function Pencil({ kind = "loop" }: { kind?: keyof typeof STROKES }) {
  return (
    <svg
      className={`pencil pencil-${kind}`}
      viewBox="0 0 100 100"
      preserveAspectRatio="none"
      aria-hidden="true"
    >
      <path d={STROKES[kind]} vectorEffect="non-scaling-stroke" />
    </svg>
  )
}
