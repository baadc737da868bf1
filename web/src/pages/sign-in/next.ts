/** Where somebody goes who has signed in: to the page that asked for it, never to another site. */
export function goesTo(next: string | null, kinds: readonly string[]): string {
  const usual = kinds.includes("operator") && !kinds.includes("customer") ? "/console" : "/"
  if (!next) return usual
  try {
    const base = "http://here.invalid"
    const target = new URL(next, base)
    const path = target.pathname
    // `/.//evil.example` is a path of ours that becomes another host where it is written alone.
    const isOurs = target.origin === base && next.startsWith("/") && !path.startsWith("//")
    return isOurs && !path.startsWith("/sign-in") ? path + target.search : usual
  } catch {
    return usual
  }
}
