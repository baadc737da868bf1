/** Shown for an empty list. Explains what will appear there and what to do first. */

import type { ReactNode } from "react"
import { Pencil } from "./Icon"

export function Empty({ title, children, act }: { title: ReactNode; children?: ReactNode; act?: ReactNode }) {
  return (
    <div className="empty">
      <div className="empty-frames" aria-hidden="true">
        <i />
        <i>
          <Pencil />
        </i>
        <i />
      </div>
      <strong>{title}</strong>
      {children && <p>{children}</p>}
      {act && <div className="empty-act">{act}</div>}
    </div>
  )
}
