/** Handles keyboard shortcuts on the canvas. In fields and dialogs, only Ctrl+S works. */

import { useEffect, useRef } from "react"

export type Keys = Readonly<Record<string, () => void>>

export function useKeys(keys: Keys): void {
  const latest = useRef(keys)
  latest.current = keys
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const isMod = event.ctrlKey || event.metaKey
      const name = `${isMod ? "mod+" : ""}${event.shiftKey && isMod ? "shift+" : ""}${event.key.toLowerCase()}`
      const act = latest.current[name]
      if (!act || event.altKey || isTyping(event.target) || document.querySelector("dialog[open]")) {
        if (!(act && name === "mod+s")) return
      }
      event.preventDefault()
      act?.()
    }
    window.addEventListener("keydown", press)
    return () => window.removeEventListener("keydown", press)
  }, [])
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.matches("input, textarea, select, [contenteditable]")
}
