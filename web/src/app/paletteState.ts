/** Holds whether the command palette is open. Ctrl-K or ⌘K opens and closes it on every page. */

import { useSyncExternalStore } from "react"

let isOpen = false
const listeners = new Set<() => void>()

function put(next: boolean): void {
  isOpen = next
  for (const listener of listeners) listener()
}

export const openPalette = () => put(true)
export const closePalette = () => put(false)

export function usePaletteOpen(): boolean {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener)
      return () => listeners.delete(listener)
    },
    () => isOpen,
  )
}

export function watchShortcut(): void {
  window.addEventListener("keydown", (event) => {
    if (
      event.key.toLowerCase() !== "k" ||
      !(event.ctrlKey || event.metaKey) ||
      event.shiftKey ||
      event.altKey
    )
      return
    event.preventDefault()
    put(!isOpen)
  })
}
