/** Short notifications at the bottom left, such as
 * `toast({ title: "gpu-05 is draining", act: { label: "Undo", run: undo } })`. */

import { type ReactNode, useEffect, useRef, useState, useSyncExternalStore } from "react"
import { words } from "@/words/en/common"
import { Button } from "./Button"
import { type State, StateIcon } from "./Status"

export interface Toast {
  title: ReactNode
  text?: ReactNode
  state?: State
  act?: { label: string; run: () => void }
}

interface Shown extends Toast {
  id: number
}

const SECONDS = 6
const TOASTS_MAX = 4
let shown: readonly Shown[] = []
let last = 0
const listeners = new Set<() => void>()

function put(next: readonly Shown[]): void {
  shown = next
  for (const listener of listeners) listener()
}

export function toast(content: Toast): number {
  last += 1
  put([...shown.slice(1 - TOASTS_MAX), { ...content, id: last }])
  return last
}

export function closeToast(id: number): void {
  put(shown.filter((other) => other.id !== id))
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener)
  return () => listeners.delete(listener)
}

export function Toasts() {
  const toasts = useSyncExternalStore(subscribe, () => shown)
  return (
    <section className="toasts" aria-label={words.news} aria-live="polite">
      {toasts.map((item) => (
        <OneToast key={item.id} toast={item} />
      ))}
    </section>
  )
}

/** Disappears after a few seconds, but not while it is hovered or focused. Failures stay until the
 * user closes them. */
function OneToast({ toast: { id, title, text, state = "succeeded", act } }: { toast: Shown }) {
  const [isHeld, setHeld] = useState(false)
  const stays = isHeld || state === "failed"
  const box = useRef<HTMLDivElement>(null)
  useEffect(() => {
    if (stays) return undefined
    const timer = setTimeout(() => closeToast(id), SECONDS * 1000)
    return () => clearTimeout(timer)
  }, [stays, id])
  return (
    <div
      ref={box}
      className="toast"
      role="status"
      onMouseEnter={() => setHeld(true)}
      onMouseLeave={() => setHeld(false)}
      onFocus={() => setHeld(true)}
      onBlur={() => setHeld(false)}
    >
      <StateIcon state={state} />
      <div className="note-text">
        <strong>{title}</strong>
        {text && <span>{text}</span>}
      </div>
      {act && (
        <Button
          size="small"
          onClick={() => {
            closeToast(id)
            act.run()
          }}
        >
          {act.label}
        </Button>
      )}
      <Button kind="ghost" size="small" icon="cross" label={words.close} onClick={() => closeToast(id)} />
    </div>
  )
}
