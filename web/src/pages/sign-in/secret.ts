/** The one-time secret in the address of this page. It stands in the fragment, which browsers don't send to servers. */

export function secretInAddress(): string {
  return new URLSearchParams(location.hash.slice(1)).get("secret") ?? ""
}

/** After its use: a reload, or a look at the history, shall not show it again. */
export function forgetSecret(): void {
  history.replaceState(history.state, "", location.pathname + location.search)
}
