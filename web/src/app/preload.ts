/** Asks for a page's code and data before it is drawn. */

import { api, cache } from "@/api"
import { type PageRoute, ROUTES } from "./routes"

type Params = Record<string, string>

/** The page of an address; undefined: there is none. */
export function findRoute(path: string): PageRoute | undefined {
  return ROUTES.find((each) => paramsOf(each.path, path) !== null)
}

/** `/graphs/:id` and `/graphs/7` give `{ id: "7" }`; null: they don't fit. */
export function paramsOf(pattern: string, path: string): Params | null {
  const wanted = pattern.split("/")
  const given = path.replace(/(.)\/$/, "$1").split("/")
  if (wanted.length !== given.length) return null
  const params: Params = {}
  for (const [at, part] of wanted.entries()) {
    const found = given[at] ?? ""
    if (part.startsWith(":") && found) params[part.slice(1)] = decoded(found)
    else if (part.toLowerCase() !== found.toLowerCase()) return null
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

/** The code of the page. What can't be loaded is told when the page is opened. */
export function loadPage(path: string): void {
  findRoute(path)
    ?.load()
    .catch(() => undefined)
}

/** What the page reads first. */
export function readFirst(path: string): void {
  const route = findRoute(path)
  const params = route && paramsOf(route.path, path)
  for (const each of (params && route?.reads(params)) ?? [])
    void cache.prime(each, (signal) => api.get(each, { signal }))
}

/** The code of pages whose links are pointed at or reached by keyboard. */
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
