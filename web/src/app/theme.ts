/** Dark or light: as the system says, unless the reader chose. */

import { useSyncExternalStore } from "react"

export type Choice = "system" | "dark" | "light"
export type Density = "compact" | "normal" | "roomy"

export interface Theme {
  readonly choice: Choice
  readonly shown: "dark" | "light"
}

const KEY = "comfyfleet.theme"
const DENSITY_KEY = "comfyfleet.density"
const listeners = new Set<() => void>()
const light = window.matchMedia("(prefers-color-scheme: light)")
let theme = current()

/** Storage may be forbidden, and then nothing is kept. */
function stored(key: string): string | null {
  try {
    return localStorage.getItem(key)
  } catch {
    return null
  }
}

function store(key: string, value: string | null): void {
  try {
    if (value === null) localStorage.removeItem(key)
    else localStorage.setItem(key, value)
  } catch {
    // It holds until the page is left.
  }
}

function current(chosen: string | null = stored(KEY)): Theme {
  const choice: Choice = chosen === "dark" || chosen === "light" ? chosen : "system"
  return { choice, shown: choice === "system" ? (light.matches ? "light" : "dark") : choice }
}

function show(next: Theme): void {
  theme = next
  document.documentElement.dataset.theme = next.shown
  for (const each of listeners) each()
}

export function chooseTheme(choice: Choice): void {
  store(KEY, choice === "system" ? null : choice)
  show(current(choice))
}

/** Before anything is drawn. */
export function startTheme(): void {
  show(current())
  light.addEventListener("change", () => show(current(theme.choice)))
}

export function useTheme(): Theme {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener)
      return () => listeners.delete(listener)
    },
    () => theme,
  )
}

/** Of tables: compact where people work with many rows, unless they chose otherwise. */
export function density(): Density {
  const chosen = stored(DENSITY_KEY)
  return chosen === "normal" || chosen === "roomy" ? chosen : "compact"
}

export function chooseDensity(chosen: Density): void {
  store(DENSITY_KEY, chosen)
  for (const each of document.querySelectorAll<HTMLElement>("[data-density]")) each.dataset.density = chosen
}
