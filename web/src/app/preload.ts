/** Loads a page's code and data before the page is rendered. */

import { api, cache } from "@/api"
import { type PageRoute, ROUTES } from "./routes"

type Params = Record<string, string>

/** Returns the route that matches an address, or undefined if none does. */
export function findRoute(path: string): PageRoute | undefined {
  return ROUTES.find((route) => paramsOf(route.path, path) !== null)
}

/** Matches an address against a pattern: `/graphs/:id` and `/graphs/7` give `{ id: "7" }`.
 * Returns null if they don't match. */
export function paramsOf(pattern: string, path: string): Params | null {
  const expected = pattern.split("/")
  const actual = path.replace(/(.)\/$/, "$1").split("/")
  if (expected.length !== actual.length) return null
  const params: Params = {}
  for (const [at, part] of expected.entries()) {
    const segment = actual[at] ?? ""
    if (part.startsWith(":") && segment) params[part.slice(1)] = decoded(segment)
    else if (part.toLowerCase() !== segment.toLowerCase()) return null
  }
  return params
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text)
  } catch {
    return text
  }
}

/** Loads the page's code. Errors are ignored here, because opening the page reports them. */
export function loadPage(path: string): void {
  findRoute(path)
    ?.load()
    .catch(() => undefined)
}

/** Starts the requests that the page makes first. */
export function readFirst(path: string): void {
  const route = findRoute(path)
  const params = route && paramsOf(route.path, path)
  for (const address of (params && route?.reads(params)) ?? [])
    void cache.prime(address, (signal) => api.get(address, { signal }))
}

/** Loads the code of pages when the user points at their links or reaches them by keyboard. */
export function loadPointedAt(): () => void {
  const load = ({ target }: Event) => {
    const link = target instanceof Element ? target.closest<HTMLAnchorElement>("a[href^='/']") : null
    if (link) loadPage(link.pathname)
  }
  document.addEventListener("pointerover", load, { passive: true })
  document.addEventListener("focusin", load)
  return () => {
    document.removeEventListener("pointerover", load)
    document.removeEventListener("focusin", load)
  }
}
