/** Returns the page to open after the sign-in: the page that required it, but never another
 * site. */
export function pageAfterSignIn(next: string | null, kinds: readonly string[]): string {
  const home = kinds.includes("operator") && !kinds.includes("customer") ? "/console" : "/"
  if (!next) return home
  try {
    const base = "http://here.invalid"
    const target = new URL(next, base)
    const path = target.pathname
    // `/.//evil.example` is a path on this site, but its normalized form, `//evil.example`, leads
    // to another host.
    const isOurs = target.origin === base && next.startsWith("/") && !path.startsWith("//")
    return isOurs && !path.startsWith("/sign-in") ? path + target.search : home
  } catch {
    return home
  }
}
