/** Returns the one-time secret from this page's address. It is in the fragment, which browsers
 * don't send to servers. */

export function secretInAddress(): string {
  return new URLSearchParams(location.hash.slice(1)).get("secret") ?? ""
}

/** Removes the secret from the address after use, so that neither a reload nor the browser history
 * shows it again. */
export function forgetSecret(): void {
  history.replaceState(history.state, "", location.pathname + location.search)
}
