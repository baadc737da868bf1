/** Hooks that customers' pages share: the account's event stream, and effects by id. */

import { useMemo } from "react"
import { cache } from "./cache"
import { useEvents } from "./events"
import { useQuery } from "./query"
import type { EffectAnswer, FollowedJob, PublicEffects } from "./schema"

/** Calls `onJob` whenever one of the user's jobs changes, and updates the balance in the top bar.
 * `onWallet` is also called when the stream starts, so that changes since the page's first read
 * aren't missed. */
export function useAccountEvents(onJob?: (job: FollowedJob) => unknown, onWallet?: () => void): void {
  useEvents<FollowedJob & { balance?: number }>("/api/account/events", (data, { event }) => {
    if (event === "job") onJob?.(data)
    if (event !== "wallet" || data.balance === undefined) return
    const balance = data.balance
    cache.set<{ balance: number }>("/api/wallet", () => ({ balance }))
    onWallet?.()
  })
}

/** Returns the catalog by effect id, or an empty map until it is loaded. Unpublished effects are
 * missing. */
export function useEffectsById(isWanted = true): ReadonlyMap<string, EffectAnswer> {
  const effects = useQuery<PublicEffects>(isWanted ? "/api/effects" : null, {
    query: { limit: 100 },
    freshSeconds: 60,
  })
  return useMemo(() => new Map(effects.data?.effects.map((effect) => [effect.id, effect])), [effects.data])
}
