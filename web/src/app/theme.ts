/** The color theme. It follows the system unless the user has chosen dark or light. */

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

/** Returns a stored value, or null if there is none or storage is unavailable. */
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
    // Storage is unavailable, so the choice lasts until the user leaves the page.
  }
}

function current(chosen: string | null = stored(KEY)): Theme {
  const choice: Choice = chosen === "dark" || chosen === "light" ? chosen : "system"
  return { choice, shown: choice === "system" ? (light.matches ? "light" : "dark") : choice }
}

function show(next: Theme): void {
  theme = next
  document.documentElement.dataset.theme = next.shown
  for (const listener of listeners) listener()
}

export function chooseTheme(choice: Choice): void {
  store(KEY, choice === "system" ? null : choice)
  show(current(choice))
}

/** Applies the theme before anything is rendered. */
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

/** Returns the density of tables: compact on pages with many rows, unless the user has chosen
 * otherwise. */
export function density(): Density {
  const chosen = stored(DENSITY_KEY)
  return chosen === "normal" || chosen === "roomy" ? chosen : "compact"
}

export function chooseDensity(chosen: Density): void {
  store(DENSITY_KEY, chosen)
  for (const element of document.querySelectorAll<HTMLElement>("[data-density]"))
    element.dataset.density = chosen
}
